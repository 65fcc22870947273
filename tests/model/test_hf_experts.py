"""Experts in Hugging Face's files: one by one or fused, and a rank reads those that it holds and no others."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fivefold.config.huggingface import model_fields, read_config
from fivefold.config.run import Experts, Model, Run
from fivefold.errors import UserError
from fivefold.model.hf_files import WeightFiles
from fivefold.model.hf_import import load_into
from fivefold.model.hf_llama import LLAMA
from fivefold.train.build import load_initial_weights
from tests.model.hf_directories import opened
from tests.model.hf_models import deepseek, exported, mixtral, qwen3_moe, saved

MAKERS = {"mixtral": mixtral, "qwen3_moe": qwen3_moe, "deepseek": deepseek}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """By type: a directory with a tensor an expert, and one with all experts of a layer in one tensor."""
    folder = tmp_path_factory.mktemp("experts")
    made = {}
    for name, make in MAKERS.items():
        model = make()
        one_by_one = saved(model, folder / name)
        made[name] = one_by_one, saved(model, folder / f"{name}-fused", save_original_format=False)
    return made


def test_gate_and_up_of_each_expert_alternate_row_by_row():
    model = Model(layers=1, hidden=8, heads=2, ffn=3, vocab=13, moe=Experts(experts=2, top_k=1, ffn=3))
    entry = next(entry for entry in LLAMA.entries(model) if entry.ours == "layers.0.ffn.experts.gate_up")
    prefix = "model.layers.0.block_sparse_moe.experts"
    assert list(entry.theirs) == [f"{prefix}.{expert}.{part}.weight" for expert in (0, 1) for part in ("w1", "w3")]
    theirs = {name: torch.randn(shape) for name, shape in entry.theirs.items()}
    ours = entry.read(((0, 2), (0, 6), (0, 8)), lambda name, box: theirs[name][tuple(slice(*side) for side in box)])
    assert torch.equal(ours[1, 0::2], theirs[f"{prefix}.1.w1.weight"])
    assert torch.equal(ours[1, 1::2], theirs[f"{prefix}.1.w3.weight"])
    for (name, tensor), part in zip(theirs.items(), entry.split(ours), strict=True):
        assert torch.equal(part, tensor), name


@pytest.mark.parametrize("name", MAKERS)
def test_both_forms_of_the_files_hold_the_same(directories, name):
    """transformers keeps a layer's experts in one tensor and writes that form when it is told to."""
    one_by_one, fused = directories[name]
    assert any("experts.0." in key for key in load_file(one_by_one / "model.safetensors"))
    assert not any("experts.0." in key for key in load_file(fused / "model.safetensors"))
    for (ours, a), (_, b) in zip(opened(one_by_one), opened(fused), strict=True):
        assert torch.equal(a, b), ours


@pytest.mark.parametrize("form", ["one by one", "fused"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_rank_with_two_experts_and_a_part_of_their_width_reads_no_other_tensor_and_no_other_element(
    directories, name, form, monkeypatch
):
    weights, read = opened(directories[name][form == "fused"]), []
    whole = {ours: weights.parameter(ours) for ours in weights.entries}
    box_of = WeightFiles.box
    monkeypatch.setattr(
        WeightFiles, "box", lambda files, name, box: (read.append((name, box)), box_of(files, name, box))[1]
    )
    for kind, box in [("gate_up", ((3, 5), (10, 31), (0, 96))), ("down", ((3, 5), (0, 96), (5, 15)))]:
        read.clear()
        ours = f"layers.1.ffn.experts.{kind}"
        piece = weights.box(ours, box)
        assert torch.equal(piece, whole[ours][tuple(slice(*side) for side in box)])
        elements = sum(torch.zeros([last - first for first, last in box]).numel() for _, box in read)
        assert elements <= piece.numel() * 22 / 21, "a pair of rows that the box cuts through is read whole"
        assert {int(key.split("experts.")[1][0]) for key, _ in read if "experts.3" in key or "experts.4" in key} == (
            {3, 4} if form == "one by one" else set()
        )
        assert all("experts.3" in key or "experts.4" in key or form == "fused" for key, _ in read)


def test_a_buffer_that_the_files_hold_is_loaded_and_one_that_they_do_not_hold_stays(directories):
    weights = opened(directories["deepseek"][0])
    tensors = {"layers.1.ffn.router.bias": torch.zeros(12), "layers.1.ffn.router.load": torch.full((12,), 0.5)}
    load_into(tensors, weights)
    stored = load_file(directories["deepseek"][0] / "model.safetensors")
    assert torch.equal(tensors["layers.1.ffn.router.bias"], stored["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert torch.equal(tensors["layers.1.ffn.router.load"], torch.full((12,), 0.5))
    with pytest.raises(KeyError):
        load_into({"layers.1.ffn.router.more": nn.Parameter(torch.zeros(1))}, weights)


def test_a_run_that_loads_begins_with_the_files_biases_and_even_loads(directories):
    fields = model_fields(read_config(str(directories["deepseek"][0])))
    model = {"from": str(directories["deepseek"][0]), "weights": "load", **fields}
    run = Run.model_validate({"name": "r", "steps": 1, "model": model, "data": {"train": [{"path": "d"}]}})
    buffers = {f"layers.1.ffn.router.{name}": torch.full((12,), torch.nan) for name in ("bias", "load")}
    load_initial_weights({}, buffers, run, lambda kind, fields: None)
    stored = load_file(directories["deepseek"][0] / "model.safetensors")
    bias, load = buffers.values()
    assert torch.equal(bias, stored["model.layers.1.mlp.gate.e_score_correction_bias"])
    assert torch.equal(load, torch.full((12,), 1 / 12))


def test_biases_are_written_in_fp32_whatever_the_rest_is_written_in(directories, tmp_path):
    """Between 0.25 and 0.5 a bf16 has steps of 0.002, and an update of a bias is 0.001."""
    source = directories["deepseek"][0]
    target = exported(source, tmp_path / "hf", dtype="bf16", shard_bytes=400_000)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    tensors = {name: tensor for file in target.glob("*.safetensors") for name, tensor in load_file(file).items()}
    original = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        exact = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if exact else torch.bfloat16)
        assert not exact or torch.equal(tensor, original[name])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_a_missing_expert_is_named(directories, tmp_path):
    tensors = load_file(directories["mixtral"][0] / "model.safetensors")
    del tensors["model.layers.2.block_sparse_moe.experts.5.w3.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((directories["mixtral"][0] / "config.json").read_bytes())
    with pytest.raises(UserError) as refused:
        opened(tmp_path)
    assert str(refused.value).splitlines()[1:] == [
        "  - missing: model.layers.2.block_sparse_moe.experts.5.w3.weight (72, 96)"
    ]
