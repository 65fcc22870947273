"""What a trained run is good for: a directory that transformers loads, and text."""

import json

import pytest
import torch

from fivefold import Run, train
from fivefold.checkpoint.find import open_checkpoint
from fivefold.data.build import build
from fivefold.data.recipe import BuildOptions
from fivefold.errors import UserError
from fivefold.observe.events import read_events
from fivefold.train.use import export_run, generate_text, load_model

TEXT = "the cat sat on the mat and the dog sat on the log. "


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """tiny-llama, tiny-bloom and tiny-deepseek after a few steps on a text, by preset name."""
    folder = tmp_path_factory.mktemp("use")
    for number in range(20):
        (folder / f"{number}.txt").write_text(TEXT * (number + 5))
    build([folder], folder / "data", BuildOptions(train_tokenizer=300, val_fraction=0.2, workers=1, progress=False))
    found = {}
    for preset in ("tiny-llama", "tiny-bloom", "tiny-deepseek"):
        file = folder / f"{preset}.yaml"
        file.write_text(
            f"name: {preset}\nout: {folder}/runs\nsteps: 12\nmodel: {{preset: {preset}, layers: 2}}\n"
            f"data: {{train: [{{path: {folder}/data}}], seq_len: 64}}\nbatch: {{global_size: 4, micro_size: 4}}\n"
            "precision: {compute: fp32}\noptim: {lr: 3e-3}\nlog: {tensorboard: false}\n"
        )
        found[preset] = train(Run.load(file))
    return found


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-bloom", "tiny-deepseek"])
def test_an_export_has_our_logits_in_transformers_and_its_import_has_our_weights(runs, preset, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export_run(runs[preset], tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ours = load_model(Run.load(runs[preset] / "run.yaml"), open_checkpoint(runs[preset]))
    tokens = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "hf").encode(TEXT)])
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)

    again = tmp_path / "again.yaml"
    again.write_text(
        f"name: again\nout: {tmp_path}\nsteps: 1\nmodel: {{from: {tmp_path}/hf, weights: load}}\n"
        f"data: {{train: [{{path: {runs[preset].parent.parent}/data}}], seq_len: 64}}\noptim: {{lr: 0}}\n"
        "precision: {compute: fp32}\nlog: {tensorboard: false}\nrouting: {bias_rate: 0}\n"
    )
    imported = load_model(Run.load(again), open_checkpoint(train(Run.load(again))))
    for (name, mine), (_, its) in zip(ours.named_parameters(), imported.named_parameters(), strict=True):
        assert torch.equal(mine, its), name
    export_run(tmp_path / "again", tmp_path / "hf2")
    for file in ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "hf2" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes(), file


def test_a_run_says_what_is_odd_about_the_weights_that_it_starts_from(runs, tmp_path):
    from safetensors.torch import load_file, save_file

    export_run(runs["tiny-llama"], tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    run = tmp_path / "run.yaml"
    run.write_text(
        f"name: noted\nout: {tmp_path}\nsteps: 1\nmodel: {{from: {tmp_path}/hf, weights: load, tied: true}}\n"
        f"data: {{train: [{{path: {runs['tiny-llama'].parent.parent}/data}}], seq_len: 64}}\n"
        "log: {tensorboard: false}\n"
    )
    events = read_events(train(Run.load(run)) / "events.jsonl")
    assert [event["message"] for event in events if event["kind"] == "weights_note"] == [
        "the stored output head equals the embedding that it is tied to"
    ]


def test_the_text_generation_pipeline_runs_on_an_export(runs, tmp_path):
    from transformers import pipeline

    export_run(runs["tiny-llama"], tmp_path / "hf", dtype="bf16")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    written = pipeline("text-generation", model=str(tmp_path / "hf"))("the cat", max_new_tokens=5, do_sample=False)
    assert written[0]["generated_text"].startswith("the cat")


def test_generation_begins_with_the_prompt_and_is_the_same_for_the_same_seed(runs):
    texts = [generate_text(runs["tiny-llama"], "the cat", max_tokens=10, seed=seed) for seed in (1, 1, 2, 3)]
    assert texts[0].startswith("the cat")
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_a_folder_without_a_run_or_a_step_that_was_not_saved_is_named(runs, tmp_path):
    with pytest.raises(UserError, match=r"holds no run.yaml"):
        export_run(tmp_path, tmp_path / "hf")
    with pytest.raises(UserError, match="has no checkpoint of step 7; it has those of step 12"):
        generate_text(runs["tiny-llama"], "the cat", step=7)


def test_documents_prompts_and_the_export_all_begin_with_the_one_beginning_that_the_tokenizer_asks_for(
    tmp_path, monkeypatch
):
    """It was added by the template, the post-processor and the caller, up to three times (in another system)."""
    from tokenizers import Tokenizer as Library
    from tokenizers import processors
    from transformers import AutoTokenizer

    from fivefold.data.tokenizer import train as train_tokenizer
    from fivefold.data.tokens import TokenSet

    inner = Library.from_str(train_tokenizer([TEXT] * 20, 300).to_json())
    inner.add_special_tokens(["<s>", "</s>"])
    names = [(name, inner.token_to_id(name)) for name in ("<s>", "</s>")]
    inner.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=names)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(TEXT * 8)
    options = BuildOptions(tokenizer=str(tmp_path), val_fraction=0, workers=1, progress=False)
    build([tmp_path / "0.txt", tmp_path / "1.txt"], tmp_path / "data", options)
    (tmp_path / "run.yaml").write_text(
        f"name: begun\nout: {tmp_path}\nsteps: 1\nmodel: {{preset: tiny-llama, layers: 1}}\n"
        f"data: {{train: [{{path: {tmp_path}/data}}], seq_len: 16}}\nlog: {{tensorboard: false}}\n"
    )
    folder = train(Run.load(tmp_path / "run.yaml"))
    export_run(folder, tmp_path / "hf")

    bos, eos = (number for _, number in names)
    document = AutoTokenizer.from_pretrained(tmp_path / "hf")(TEXT * 8).input_ids
    assert document.count(bos) == 1
    tokens = TokenSet.open(tmp_path / "data")
    assert tokens.read(0, tokens.tokens).tolist() == [*document, eos] * 2
    prompts = []
    monkeypatch.setattr(
        "fivefold.train.use.generate", lambda model, tokens, *_, **__: prompts.append(tokens) or iter([])
    )
    generate_text(folder, TEXT * 8)
    assert prompts == [document]
    for file in ("config.json", "generation_config.json"):
        ids = json.loads((tmp_path / "hf" / file).read_text())
        assert (ids["bos_token_id"], ids["eos_token_id"]) == (bos, eos)
