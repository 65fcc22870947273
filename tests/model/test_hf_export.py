"""An export is a whole directory or none, with ids that agree in all files and shards of the size asked for."""

import json

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fivefold.config.huggingface import TokenIds, read_token_ids
from fivefold.data.tokenizer import Tokenizer as TrainingTokenizer
from fivefold.errors import RunError, UserError
from fivefold.model.hf_export import Shard, export, plan_shards
from fivefold.model.hf_tokenizer import write_tokenizer
from tests.model.hf_directories import adaptor_of, opened, read_model
from tests.model.hf_models import (
    END,
    bloom,
    deepseek,
    exported,
    llama,
    mixtral,
    qwen3,
    qwen3_moe,
    saved,
    tokenizer_file,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved(llama(), tmp_path_factory.mktemp("source"))


def contents(directory):
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


@pytest.mark.parametrize(
    "make", [llama, qwen3, bloom, lambda: llama(tie_word_embeddings=True), mixtral, qwen3_moe, deepseek]
)
def test_what_is_imported_and_exported_again_is_what_transformers_wrote(tmp_path, make):
    source = saved(make(), tmp_path / "theirs")
    ours = exported(source, tmp_path / "ours")
    theirs, written = load_file(source / "model.safetensors"), load_file(ours / "model.safetensors")
    assert written.keys() == theirs.keys()
    assert all(torch.equal(written[name], theirs[name]) for name in theirs)
    again = exported(ours, tmp_path / "again")
    assert contents(again) == contents(ours)


def test_a_large_model_is_cut_into_shards_in_its_own_order(source, tmp_path):
    whole = load_file(exported(source, tmp_path / "one") / "model.safetensors")
    many = exported(source, tmp_path / "many", shard_bytes=200_000)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    files = sorted(many.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 200_000 or len(tensors) == 1
        assert all(
            index["weight_map"][name] == file.name and torch.equal(t, whole[name]) for name, t in tensors.items()
        )
    assert index["weight_map"].keys() == whole.keys()
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(many).parameters()) == sum(
        t.numel() for t in whole.values()
    )


def test_shards_are_planned_from_sizes_alone():
    sizes = {"a": 6, "b": 6, "huge": 200, "c": 2, "d": 10}
    assert plan_shards(sizes, shard_bytes=12) == [
        Shard("model-00001-of-00003.safetensors", ("a", "b")),
        Shard("model-00002-of-00003.safetensors", ("huge",)),
        Shard("model-00003-of-00003.safetensors", ("c", "d")),
    ]
    assert plan_shards(sizes, shard_bytes=10**6) == [Shard("model.safetensors", tuple(sizes))]


def test_parameters_are_asked_for_once_each_in_the_models_order(source, tmp_path):
    model, weights, asked = read_model(source), opened(source), []
    export(
        tmp_path / "hf", model, adaptor_of(model), lambda name: asked.append(name) or weights.parameter(name), END, None
    )
    assert asked == list(weights.entries)


def test_bf16_is_stored_as_bf16_and_said_so(source, tmp_path):
    target = exported(source, tmp_path / "hf", dtype="bf16")
    assert {tensor.dtype for tensor in load_file(target / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(target, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("ids", [TokenIds(eos=(0,)), TokenIds(bos=5, eos=(0, 7), pad=9)])
def test_special_ids_agree_in_all_files(source, tmp_path, ids):
    model, weights = read_model(source), opened(source)
    tokenizer = tokenizer_file(tmp_path / "tokenizer")
    export(tmp_path / "hf", model, adaptor_of(model), weights.parameter, ids, tokenizer)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    generation = GenerationConfig.from_pretrained(tmp_path / "hf")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    eos = ids.eos[0] if len(ids.eos) == 1 else list(ids.eos)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (ids.bos, eos, ids.pad)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (ids.bos, eos, ids.pad)
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (ids.bos, ids.eos[0], ids.pad)
    assert read_token_ids(tmp_path / "hf") == ids


@pytest.mark.parametrize("make", [llama, bloom, qwen3])
def test_the_exported_tokenizer_gives_the_same_ids_and_text(tmp_path, make):
    tokenizer = tokenizer_file(tmp_path / "tokenizer")
    target = exported(saved(make(), tmp_path / "theirs"), tmp_path / "hf", tokenizer=tokenizer.parent)
    loaded, original = AutoTokenizer.from_pretrained(target), Tokenizer.from_file(str(tokenizer))
    text = "def main():  the cat <|endoftext|>\n\tÄ ."
    assert loaded(text)["input_ids"] == original.encode(text).ids
    assert loaded.decode(original.encode(text).ids) == text
    assert loaded.model_max_length == read_model(target).context


@pytest.mark.parametrize("adds", ["", "<s> $A", "<s> $A <|endoftext|>"])
def test_a_prompt_begins_as_the_documents_of_the_training_did(tmp_path, adds):
    """Whether or not the original tokenizer puts bos and eos around a text, and for readers of tokenizer.json alone."""
    inner = Tokenizer.from_file(str(tokenizer_file(tmp_path / "original")))
    inner.add_special_tokens(["<s>"])
    if adds:
        special = [(token, inner.token_to_id(token)) for token in ("<s>", "<|endoftext|>")]
        inner.post_processor = TemplateProcessing(single=adds, special_tokens=special)
    inner.save(str(tmp_path / "original/tokenizer.json"))
    trained = TrainingTokenizer.load(tmp_path / "original")
    trained.save(tmp_path / "run")
    (tmp_path / "hf").mkdir()
    model = read_model(saved(llama(), tmp_path / "theirs"))
    ids = TokenIds(bos=trained.bos, eos=(trained.eod,))
    write_tokenizer(tmp_path / "run", tmp_path / "hf", ids, model)
    text = "def main(): the cat"
    assert Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json")).encode(text).ids == trained.encode(text)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"] == trained.encode(text)
    assert trained.encode(text)[:1] == ([inner.token_to_id("<s>")] if adds else inner.encode("def").ids[:1])


def test_settings_of_an_imported_tokenizer_are_kept(source, tmp_path):
    folder = tokenizer_file(tmp_path / "tokenizer").parent
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "x", "padding_side": "left"})
    )
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    target = exported(source, tmp_path / "hf", tokenizer=folder)
    loaded = AutoTokenizer.from_pretrained(target)
    assert (loaded.padding_side, loaded.eos_token, loaded.chat_template) == ("left", "<|endoftext|>", "{{ messages }}")


def test_a_target_that_is_taken_is_refused_before_any_weight_is_read(source, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kept").write_text("kept")
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UserError, match=r"full is not empty; name another directory"):
        exported(source, tmp_path / "full")
    with pytest.raises(UserError, match=r"file is a file"):
        exported(source, tmp_path / "file")
    assert contents(tmp_path / "full") == {"kept": b"kept"}
    (tmp_path / "empty").mkdir()
    assert (exported(source, tmp_path / "empty") / "config.json").exists()


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (TokenIds(eos=(1003,)), "the eos id 1003 is outside of the model's vocabulary of 1003"),
        (TokenIds(eos=(0,), pad=-1), "the pad id -1 is outside of"),
        (TokenIds(bos=900, eos=(0,)), "the bos id 900 is no token of"),
        (TokenIds(eos=(0, 900)), "the eos id 900 is no token of"),
    ],
)
def test_ids_without_a_token_are_refused(source, tmp_path, ids, said):
    model, weights = read_model(source), opened(source)
    with pytest.raises(UserError) as refused:
        export(
            tmp_path / "hf", model, adaptor_of(model), weights.parameter, ids, tokenizer_file(tmp_path / "tokenizer")
        )
    assert said in str(refused.value)
    assert not (tmp_path / "hf").exists()


def test_a_tokenizer_that_is_larger_than_the_model_absent_or_broken_is_refused(tmp_path):
    source = saved(llama(vocab_size=256), tmp_path / "theirs")
    with pytest.raises(UserError, match=r"has token id \d+, but the model's vocabulary is 256"):
        exported(source, tmp_path / "hf", tokenizer=tokenizer_file(tmp_path / "tokenizer"))
    with pytest.raises(UserError, match=r"nowhere does not exist"):
        exported(source, tmp_path / "hf", tokenizer=tmp_path / "nowhere")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match=r"broken\.json is no tokenizer\.json"):
        exported(source, tmp_path / "hf", tokenizer=tmp_path / "broken.json")


def test_an_export_that_fails_leaves_nothing_behind_and_the_next_one_clears_a_killed_ones_remains(source, tmp_path):
    model, weights = read_model(source), opened(source)

    def fails(error):
        def parameter(name):
            if name == "head.weight":
                raise error
            return weights.parameter(name)

        return parameter

    for error in (OSError("No space left on device"), SafetensorError("I/O error: No space left on device")):
        with pytest.raises(RunError, match=r"hf could not be written, and nothing of it is left: .*No space left"):
            export(tmp_path / "hf", model, adaptor_of(model), fails(error), END, None, shard_bytes=200_000)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "hf", model, adaptor_of(model), fails(KeyboardInterrupt()), END, None)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is a file; name another folder"):
        exported(source, tmp_path / "file" / "hf")
    (tmp_path / "file").unlink()
    (tmp_path / ".hf.partial").mkdir()
    (tmp_path / ".hf.partial/half").write_text("half")
    exported(source, tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert "half" not in contents(tmp_path / "hf")
