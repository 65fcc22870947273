"""A Hugging Face directory is imported whole or refused with a list: nothing is skipped, nothing stays random."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fivefold.errors import UserError
from fivefold.model.hf_import import load_huggingface, load_into, open_weights
from fivefold.model.transformer import Transformer
from tests.checkpoint.crew import Crew
from tests.model.hf_directories import adaptor_of, loaded_by_a_rank, opened, read_model, rewritten
from tests.model.hf_models import bloom, deepseek, llama, mixtral, saved

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return saved(llama(), tmp_path_factory.mktemp("untied"))


def drop_head(tensors):
    del tensors[HEAD]


def equal_head(tensors):
    tensors[HEAD] = tensors[EMBEDDING].clone()


def keep(tensors):
    pass


def notes_of(directory, tied):
    model = read_model(directory).model_copy(update={"tied": tied})
    notes = []
    weights = open_weights(directory, model, adaptor_of(model), lambda kind, fields: notes.append(fields["message"]))
    return dict(weights), notes


@pytest.mark.parametrize(
    ("tied", "change", "note"),
    [
        (False, keep, []),
        (True, drop_head, []),
        (True, equal_head, ["the stored output head equals the embedding that it is tied to"]),
        (
            False,
            equal_head,
            ["the output head equals the embedding, but model.tied is false: they will be trained apart"],
        ),
    ],
)
def test_a_head_that_agrees_with_the_tie_is_loaded_and_what_is_odd_is_said(untied, tmp_path, tied, change, note):
    directory = rewritten(untied, tmp_path / "hf", change)
    weights, notes = notes_of(directory, tied)
    assert notes == note
    assert ("head.weight" in weights) is not tied
    stored = load_file(directory / "model.safetensors")
    assert torch.equal(weights["embedding.weight"], stored[EMBEDDING])
    assert tied or torch.equal(weights["head.weight"], stored[HEAD])


def test_a_real_head_is_never_thrown_away(untied):
    with pytest.raises(
        UserError, match=r"differs from the embedding, but model\.tied is true.*Set model\.tied to false"
    ):
        opened(untied, tied=True)


def test_a_missing_head_never_stays_random(untied, tmp_path):
    with pytest.raises(UserError, match=rf"missing: {HEAD} \(1003, 96\) \(model\.tied is false"):
        opened(rewritten(untied, tmp_path / "hf", drop_head), tied=False)


def test_missing_unexpected_misshapen_and_quantized_tensors_are_listed_at_once(untied, tmp_path):
    def damage(tensors):
        del tensors["model.layers.1.self_attn.k_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 96)
        tensors["model.norm.weight"] = torch.ones(95)
        tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(72, 96, dtype=torch.int8)

    with pytest.raises(UserError) as refused:
        opened(rewritten(untied, tmp_path / "hf", damage))
    assert str(refused.value).splitlines()[1:] == [
        "  - missing: model.layers.1.self_attn.k_proj.weight (32, 96)",
        "  - unexpected: model.layers.0.self_attn.q_proj.lora_A.weight (4, 96)",
        "  - wrong type: model.layers.2.mlp.up_proj.weight is I8, not one of F64, F32, BF16, F16",
        "  - wrong shape: model.norm.weight is (95,), the model wants (96,)",
    ]


def test_a_long_list_is_cut_and_says_how_many_more(untied, tmp_path):
    def drop_layer(tensors):
        for name in [name for name in tensors if ".layers." in name]:
            del tensors[name]

    with pytest.raises(UserError, match=r"and 7 more$"):
        opened(rewritten(untied, tmp_path / "hf", drop_layer))


def test_rotary_frequencies_of_old_files_are_left_out_aloud(untied, tmp_path):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    _, notes = notes_of(rewritten(untied, tmp_path / "hf", add), tied=False)
    assert notes == ["left out, as they are no weights"]


@pytest.mark.parametrize("make", [llama, bloom])
def test_a_file_saved_from_the_body_alone_is_read(tmp_path, make):
    """The BLOOM files on the hub lack the prefix `transformer.`."""
    whole = make(tie_word_embeddings=True)
    saved(whole, tmp_path / "whole")
    whole.base_model.save_pretrained(tmp_path / "body")
    (tmp_path / "body/config.json").write_bytes((tmp_path / "whole/config.json").read_bytes())
    assert not any(
        name.startswith(("model.", "transformer.")) for name in load_file(tmp_path / "body/model.safetensors")
    )
    for (name, a), (_, b) in zip(opened(tmp_path / "whole"), opened(tmp_path / "body"), strict=True):
        assert torch.equal(a, b), name


def test_shards_are_read_like_one_file(tmp_path):
    model = llama()
    saved(model, tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    for (name, a), (_, b) in zip(opened(tmp_path / "one"), opened(tmp_path / "many"), strict=True):
        assert torch.equal(a, b), name


def sharded(directory):
    llama().save_pretrained(directory, max_shard_size="200KB")
    return directory


def forget_shard(directory):
    (directory / "model-00002-of-00005.safetensors").unlink()


def cut_shard(directory):
    file = next(directory.glob("model-00003*"))
    file.write_bytes(file.read_bytes()[:-1])


def swap_index(directory):
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = content["weight_map"][EMBEDDING]
    index.write_text(json.dumps(content))


def empty_index(directory):
    (directory / "model.safetensors.index.json").write_text("{}")


def both(directory):
    save_file({"x": torch.zeros(1)}, directory / "model.safetensors")


def neither(directory):
    for file in directory.glob("model*"):
        file.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (forget_shard, "model-00002-of-00005.safetensors is missing, which model.safetensors.index.json lists"),
        (cut_shard, "model-00003-of-00005.safetensors is damaged or no safetensors file"),
        (swap_index, "and the shards differ, for example: model.norm.weight in model-0000"),
        (empty_index, "has no weight_map"),
        (both, "holds model.safetensors and model.safetensors.index.json: delete the one that is stale"),
        (neither, "only safetensors are read; convert pytorch_model.bin with transformers"),
    ],
)
def test_damaged_files_are_named(tmp_path, damage, said):
    directory = sharded(tmp_path / "hf")
    assert (directory / "model-00005-of-00005.safetensors").exists()
    damage(directory)
    with pytest.raises(UserError) as refused:
        opened(directory)
    assert said in str(refused.value)


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    """Gloo ranks that stay for the whole file."""
    crew = Crew(4, tmp_path_factory.mktemp("crew"))
    yield crew
    crew.close()


@pytest.mark.parametrize("make", [lambda: llama(num_key_value_heads=4), bloom, mixtral, deepseek])
def test_three_ranks_load_their_own_shards_of_any_dimension_in_the_parameters_type(tmp_path, make, crew):
    """No number of ranks divides the rows: 1003 of the embedding, heads in groups, gate and up in pairs, experts."""
    directory = saved(make(), tmp_path / "theirs")
    whole = {name: tensor.bfloat16() for name, tensor in opened(directory)}
    for loaded in crew.run(loaded_by_a_rank, directory, ranks=3):
        assert loaded.keys() == whole.keys()
        assert all(torch.equal(loaded[name], whole[name]) for name in whole)


def test_a_part_of_the_model_takes_its_part_of_the_weights(untied):
    part = nn.ModuleDict({"embedding": nn.Embedding(1003, 96), "head": nn.Linear(96, 1003, bias=False)})
    load_into(dict(part.named_parameters()), opened(untied))
    stored = load_file(untied / "model.safetensors")
    assert torch.equal(part["embedding"].weight, stored[EMBEDDING])
    assert torch.equal(part["head"].weight, stored[HEAD])


def test_any_range_of_our_rows_is_read_from_the_rows_that_make_it_up(untied):
    weights = opened(untied)
    whole = weights.parameter("layers.1.attention.qkv.weight")
    for start, stop in [(0, 1), (0, 160), (7, 9), (39, 41), (40, 80), (155, 160)]:
        box = ((start, stop), (5, 90))
        assert torch.equal(weights.box("layers.1.attention.qkv.weight", box), whole[start:stop, 5:90])


def test_a_run_that_loads_must_say_from_where(untied):
    model = read_model(untied)
    with pytest.raises(UserError, match=r"model\.from names no Hugging Face directory"):
        load_huggingface({}, model, adaptor_of(model))
    with pytest.raises(UserError, match=r"family 'llama' cannot read Hugging Face's files"):
        load_huggingface({}, model, None)
    module = Transformer(model)
    parameters = dict(module.named_parameters())
    load_huggingface(parameters, model.model_copy(update={"from_": str(untied)}), adaptor_of(model))
    assert all(torch.equal(parameter, opened(untied).parameter(name)) for name, parameter in parameters.items())
