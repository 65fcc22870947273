"""The fp8 release format of DeepSeek-V3: each block's numbers times its scale, in fp32, whatever box is read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivefold.errors import UserError
from tests.model.hf_directories import opened
from tests.model.hf_models import deepseek, in_fp8, saved

BLOCK = (128, 64)
"""Not square, so that rows are not taken for columns. No size below is a multiple of either."""


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """216 x 200 queries in 2 x 4 blocks, 72 x 200 feed-forwards in 1 x 4, experts of 40 x 200."""
    folder = tmp_path_factory.mktemp("fp8")
    model = deepseek(hidden_size=200, q_lora_rank=None, num_hidden_layers=2)
    return in_fp8(saved(model, folder / "plain"), folder / "fp8", BLOCK)


def test_each_number_is_the_stored_one_times_the_scale_of_its_block(released):
    stored = load_file(released / "model.safetensors")
    weights = opened(released)
    for ours, theirs in {
        "layers.1.attention.output.weight": "model.layers.1.self_attn.o_proj.weight",
        "layers.0.ffn.down.weight": "model.layers.0.mlp.down_proj.weight",
    }.items():
        scales, plain = stored[f"{theirs}_scale_inv"], stored[theirs].float()
        assert scales.numel() > 1
        expected = torch.stack(
            [torch.stack([plain[i, j] * scales[i // 128, j // 64] for j in range(plain.shape[1])]) for i in range(200)]
        )
        assert weights.parameter(ours).dtype == torch.float32
        assert torch.equal(weights.parameter(ours), expected)


def test_every_tensor_is_that_of_the_same_files_in_fp32(released, tmp_path):
    """Those in fp8, experts with scales of their own each, and those that stayed as they were."""

    def in_fp32(tensors, config):
        for name in [name for name in tensors if f"{name}_scale_inv" in tensors]:
            rows, columns = tensors[name].shape
            scales = tensors.pop(f"{name}_scale_inv").repeat_interleave(128, 0).repeat_interleave(64, 1)
            tensors[name] = tensors[name].float() * scales[:rows, :columns]
        del config["quantization_config"]

    plain = opened(changed(released, tmp_path / "fp32", in_fp32))
    for (name, a), (_, b) in zip(opened(released), plain, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("ours", "box"),
    [
        ("layers.1.attention.output.weight", ((127, 129), (63, 65))),
        ("layers.1.attention.output.weight", ((199, 200), (0, 168))),
        ("layers.1.attention.q.weight", ((100, 140), (130, 200))),
        ("layers.0.ffn.gate_up.weight", ((33, 144), (0, 100))),
        ("layers.1.ffn.experts.down", ((2, 7), (120, 200), (7, 33))),
        ("layers.1.ffn.experts.gate_up", ((11, 12), (3, 80), (190, 200))),
    ],
)
def test_any_box_is_that_of_the_whole(released, ours, box):
    weights = opened(released)
    assert torch.equal(weights.box(ours, box), weights.parameter(ours)[tuple(slice(*side) for side in box)])


def changed(source, target, change):
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    change(tensors, config)
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


NAME = "model.layers.1.self_attn.o_proj.weight"


def without_scales(tensors, config):
    del tensors[f"{NAME}_scale_inv"]


def with_scales_of_other_blocks(tensors, config):
    tensors[f"{NAME}_scale_inv"] = torch.ones(4, 2)


def with_scales_of_nothing(tensors, config):
    tensors["model.norm.weight_scale_inv"] = torch.ones(1)


def with_scales_that_are_whole_numbers(tensors, config):
    tensors[f"{NAME}_scale_inv"] = torch.ones(2, 3, dtype=torch.int32)


def without_a_block(tensors, config):
    del config["quantization_config"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_scales, f"wrong type: {NAME} is F8_E4M3 without {NAME}_scale_inv"),
        (with_scales_of_other_blocks, f"{NAME} (200, 168) has scales (4, 2), not one for each block of 128 x 64"),
        (with_scales_that_are_whole_numbers, f"wrong type: {NAME}_scale_inv is I32"),
        (with_scales_of_nothing, "unexpected: model.norm.weight_scale_inv (1,)"),
        (without_a_block, "q_proj.weight is F8_E4M3, but config.json has no quantization_config of method fp8"),
    ],
)
def test_scales_that_do_not_fit_are_refused_before_a_weight_is_read(released, tmp_path, change, said):
    with pytest.raises(UserError) as refused:
        opened(changed(released, tmp_path / "hf", change))
    assert said in str(refused.value)
