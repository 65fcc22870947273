"""Rotary frequencies bit for bit as transformers', for each kind of scaling, of whole heads and of latent attention."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding, yarn_apply_mscale

from fivefold.config.run import LatentAttention, Model, RopeScaling
from fivefold.errors import UserError
from fivefold.model.rope import attention_factor, frequencies, score_factor

SCALINGS = [
    RopeScaling(type="linear", factor=4.0),
    RopeScaling(type="llama3", factor=8.0, original_context=64),
    RopeScaling(type="llama3", factor=32.0, original_context=8192, low_freq_factor=2.0, high_freq_factor=5.0),
    RopeScaling(type="yarn", factor=4.0, original_context=64),
    RopeScaling(type="yarn", factor=40.0, original_context=4096, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3),
    RopeScaling(type="yarn", factor=0.5, original_context=4096),
]


def model(scaling: RopeScaling | None, theta: float = 10000.0, head_size: int = 64) -> Model:
    sizes = {"layers": 1, "hidden": 4 * head_size, "heads": 4, "ffn": 8, "vocab": 8}
    return Model(**sizes, rope_theta=theta, rope_scaling=scaling)


def of_transformers(ours: Model) -> tuple[torch.Tensor, float]:
    scaling = ours.rope_scaling
    assert scaling is not None
    parameters = {"rope_type": scaling.type, "rope_theta": ours.rope_theta, "factor": scaling.factor}
    if scaling.type == "llama3":
        parameters |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.type == "yarn":
        parameters |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        parameters |= {"attention_factor": scaling.attention_factor} if scaling.attention_factor else {}
    if scaling.original_context is not None:
        parameters["original_max_position_embeddings"] = scaling.original_context
    config = LlamaConfig(
        hidden_size=ours.hidden, num_attention_heads=ours.heads, head_dim=ours.head_size, rope_parameters=parameters
    )
    return ROPE_INIT_FUNCTIONS[scaling.type](config, torch.device("cpu"))


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("head_size", [16, 128])
def test_frequencies_and_factor_are_those_of_transformers(scaling: RopeScaling, theta: float, head_size: int) -> None:
    ours = model(scaling, theta, head_size)
    theirs, factor = of_transformers(ours)
    assert torch.equal(frequencies(ours, torch.float32), theirs)
    assert attention_factor(ours) == factor


@pytest.mark.parametrize("scaling", [None, *SCALINGS], ids=str)
def test_fp64_frequencies_are_the_same_to_fp32_s_rounding(scaling: RopeScaling | None) -> None:
    wide = frequencies(model(scaling), torch.float64)
    assert wide.dtype == torch.float64
    torch.testing.assert_close(frequencies(model(scaling), torch.float32).double(), wide, rtol=1e-6, atol=0)


def test_without_scaling_they_fall_from_1_to_almost_one_over_theta() -> None:
    found = frequencies(model(None), torch.float64)
    assert found[0] == 1.0
    torch.testing.assert_close(found[-1].item(), 10000 ** (-62 / 64))
    assert attention_factor(model(None)) == 1.0


LATENT = Model(
    layers=1,
    hidden=64,
    heads=4,
    ffn=8,
    vocab=8,
    mla=LatentAttention(kv_rank=8, plain=10, rotated=24, value=10),
)
YARN = {"type": "yarn", "original_context": 64}


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(factor=40.0, mscale=1.0, mscale_all_dim=1.0, **YARN),
        RopeScaling(factor=8.0, mscale=1.5, mscale_all_dim=0.7, beta_fast=16.0, **YARN),
        RopeScaling(factor=8.0, mscale_all_dim=0.7, **YARN),
        RopeScaling(factor=8.0, mscale=0.7, **YARN),
        RopeScaling(factor=0.5, mscale=1.5, mscale_all_dim=0.7, **YARN),
        RopeScaling(factor=8.0, mscale=1.5, mscale_all_dim=0.7, attention_factor=1.3, **YARN),
        RopeScaling(factor=8.0, **YARN),
        RopeScaling(type="linear", factor=8.0),
        None,
    ],
    ids=str,
)
def test_latent_attention_turns_its_own_channels_and_weighs_scores_as_deepseek_v3(scaling: RopeScaling | None) -> None:
    ours = LATENT.model_copy(update={"rope_scaling": scaling})
    assert ours.mla is not None
    parameters = {"rope_type": "default" if scaling is None else scaling.type, "rope_theta": ours.rope_theta}
    if scaling is not None:
        fields = scaling.model_dump(exclude_defaults=True, exclude={"type", "original_context"})
        parameters |= fields | {"original_max_position_embeddings": scaling.original_context}
    config = DeepseekV3Config(hidden_size=64, num_attention_heads=4, qk_rope_head_dim=24, rope_parameters=parameters)
    theirs = DeepseekV3RotaryEmbedding(config)
    assert torch.equal(frequencies(ours, torch.float32), theirs.inv_freq)
    assert attention_factor(ours) == theirs.attention_scaling
    assert score_factor(ours) == pytest.approx(yarn_apply_mscale(config.rope_parameters, 1.0), rel=1e-15)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_missing_original_context_is_named(kind: str) -> None:
    with pytest.raises(UserError, match=f"type {kind} needs original_context"):
        frequencies(model(RopeScaling(type=kind, factor=2.0)), torch.float32)
