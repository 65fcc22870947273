"""What a model weighs and computes, against published figures and figures worked out by hand."""

from math import prod

import pytest
import torch

from fivefold.config.models import preset_names
from fivefold.config.run import Model
from fivefold.errors import UserError
from fivefold.model.spec import (
    forward_flops_per_token,
    matmul_parameters,
    parameter_shapes,
    parameters,
    train_flops_per_token,
)
from fivefold.model.transformer import Transformer
from tests.config.test_presets import preset

TINY = Model(layers=5, hidden=48, heads=12, kv_heads=3, head_dim=8, ffn=80, vocab=1003)


def test_the_named_checks_come_out_right():
    dense16 = preset("llama-3-8b").model_copy(update={"layers": 16})
    billions = {name: parameters(preset(name)).total / 1e9 for name in ("llama-3-405b", "bloom-176b")}
    assert f"{billions['llama-3-405b']:.2f}" == "405.85"
    assert f"{billions['bloom-176b']:.1f}" == "176.2"
    assert f"{parameters(dense16).total / 1e9:.2f}" == "4.54"


VARIANTS = {
    **{name: preset(name) for name in preset_names()},
    "biases": TINY.model_copy(update={"bias": True}),
    "layer norm without biases": TINY.model_copy(update={"norm": "layernorm"}),
    "layer norm with biases": TINY.model_copy(update={"norm": "layernorm", "bias": True, "embedding_norm": True}),
    "gelu and head norms": TINY.model_copy(update={"activation": "gelu", "qk_norm": True, "tied": True}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_and_counts_are_those_of_the_real_modules(name):
    model = VARIANTS[name] if VARIANTS[name].vocab != "auto" else VARIANTS[name].model_copy(update={"vocab": 1003})
    with torch.device("meta"):
        module = Transformer(model)
    real = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    assert list(real.items()) == list(parameter_shapes(model).items())
    assert parameters(model).total == sum(parameter.numel() for parameter in module.parameters())
    assert parameters(model).dense_layer == sum(parameter.numel() for parameter in module.layers["0"].parameters())


def test_the_parts_sum_to_the_total():
    counts = parameters(TINY)
    assert counts.total == counts.embedding + counts.head + 5 * counts.dense_layer + counts.norms
    assert counts.total == sum(prod(shape) for shape in parameter_shapes(TINY).values())
    assert counts.active == counts.total
    assert counts.dense_layer == 48 * 18 * 8 + 96 * 48 + 3 * 48 * 80 + 2 * 48


def test_a_tied_head_is_counted_once_but_still_multiplies():
    tied = TINY.model_copy(update={"tied": True})
    assert parameters(TINY).total - parameters(tied).total == parameters(TINY).head == 1003 * 48
    assert parameters(tied).head == 0
    assert matmul_parameters(tied) == matmul_parameters(TINY)


def test_flops_are_six_a_weight_and_half_of_the_attention_square():
    matmul = 5 * (48 * 18 * 8 + 96 * 48 + 3 * 48 * 80) + 1003 * 48
    attention = 5 * 2 * 2 * (128 / 2) * 96  # layers x two products x multiply and add x keys seen x heads' width
    assert forward_flops_per_token(TINY, 128) == 2 * matmul + attention
    assert train_flops_per_token(TINY, 128) == 6 * matmul + 3 * attention


def test_llama_405b_takes_six_n_a_token_and_3_8e25_in_all():
    """15.6T tokens took 3.8e25 FLOPs ("The Llama 3 Herd of Models", section 3.2), by their 6 N D."""
    model = preset("llama-3-405b")
    assert 6 * matmul_parameters(model) * 15.6e12 == pytest.approx(3.8e25, rel=0.01)


def test_norms_and_biases_count_as_parameters_but_not_as_flops():
    plain = TINY.model_copy(update={"norm": "layernorm", "activation": "gelu", "kv_heads": 12})
    biased = plain.model_copy(update={"bias": True, "embedding_norm": True})
    more = 5 * (36 * 8 + 48 + 80 + 48 + 2 * 48) + 3 * 48 + 0
    assert parameters(biased).total - parameters(plain).total == more
    assert train_flops_per_token(biased, 64) == train_flops_per_token(plain, 64)


def test_an_unknown_vocabulary_is_asked_for():
    with pytest.raises(UserError, match=r"model\.vocab is auto"):
        parameters(TINY.model_copy(update={"vocab": "auto"}))
