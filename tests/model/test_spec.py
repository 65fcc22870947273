"""What a model weighs and computes, against published figures and figures worked out by hand."""

from math import prod

import pytest
import torch
from torch import nn

from fivefold.config.models import preset_names
from fivefold.config.run import Experts, LatentAttention, Model
from fivefold.errors import UserError
from fivefold.model.spec import (
    attention_flops_per_token,
    forward_flops_per_token,
    is_moe,
    layer_matmul_parameters,
    matmul_parameters,
    moe_layers,
    mtp_matmul_parameters,
    parameter_shapes,
    parameters,
    train_flops_per_token,
)
from fivefold.model.transformer import Transformer
from tests.config.test_presets import preset

TINY = Model(layers=5, hidden=48, heads=12, kv_heads=3, head_dim=8, ffn=80, vocab=1003)
MIXTURE = Experts(experts=6, top_k=2, ffn=40)
SHARED = MIXTURE.model_copy(update={"shared": 2, "dense_layers": 2, "bias": True})
LATENT = LatentAttention(q_rank=20, kv_rank=14, plain=10, rotated=6, value=8)


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
    "experts": TINY.model_copy(update={"moe": MIXTURE, "qk_norm": True}),
    "shared experts behind dense layers": TINY.model_copy(update={"moe": SHARED}),
    "latent attention": TINY.model_copy(update={"mla": LATENT}),
    "latent attention from the stream": TINY.model_copy(update={"mla": LATENT.model_copy(update={"q_rank": None})}),
    "two further tokens": TINY.model_copy(update={"mtp": 2, "tied": True}),
    "further tokens with biases": TINY.model_copy(update={"mtp": 1, "bias": True, "norm": "layernorm"}),
    "all of them": TINY.model_copy(update={"moe": SHARED, "mla": LATENT, "mtp": 2}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_and_counts_are_those_of_the_real_modules(name):
    model = VARIANTS[name] if VARIANTS[name].vocab != "auto" else VARIANTS[name].model_copy(update={"vocab": 1003})
    with torch.device("meta"):
        module = Transformer(model)
    real = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    assert list(real.items()) == list(parameter_shapes(model).items())
    counts = parameters(model)
    assert counts.total == elements(module)
    assert counts.dense_layer == (0 if is_moe(model, 0) else elements(module.layers["0"]))
    assert counts.moe_layer == (elements(module.layers[str(model.layers - 1)]) if model.moe else 0)
    assert counts.mtp == (elements(module.mtp) if model.mtp else 0)
    assert set(moe_layers(model)) == {layer for layer in range(model.layers + model.mtp) if has_router(module, layer)}


def elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def has_router(module: Transformer, layer: int) -> bool:
    layers = module.model.layers
    block = module.layers[str(layer)] if layer < layers else module.mtp[str(layer - layers)].block
    return hasattr(block.ffn, "router")


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


def test_a_token_meets_all_but_the_experts_that_it_is_not_sent_to():
    model = TINY.model_copy(update={"moe": SHARED, "mtp": 1})
    counts = parameters(model)
    assert counts.total - counts.active == 4 * (6 - 2) * 3 * 48 * 40  # three layers and the block of the prediction
    assert counts.total == counts.embedding + counts.head + 2 * counts.dense_layer + 3 * counts.moe_layer + (
        counts.mtp + counts.norms
    )
    assert counts.mtp == counts.moe_layer + 2 * 48 * 48 + 3 * 48
    assert (counts.embedding, counts.head, counts.norms) == (1003 * 48, 1003 * 48, 48)


def test_flops_of_experts_are_those_that_a_token_is_sent_to_the_shared_ones_and_the_router():
    model = TINY.model_copy(update={"moe": SHARED})
    attention, dense = 48 * 18 * 8 + 96 * 48, 3 * 48 * 80
    mixture = 6 * 48 + (2 + 2) * 3 * 48 * 40
    assert matmul_parameters(model) == 5 * attention + 2 * dense + 3 * mixture + 1003 * 48
    assert layer_matmul_parameters(model, 1) == attention + dense
    assert layer_matmul_parameters(model, 2) == attention + mixture
    more_experts = model.model_copy(update={"moe": SHARED.model_copy(update={"experts": 60})})
    assert matmul_parameters(more_experts) - matmul_parameters(model) == 3 * 54 * 48  # the router alone


def test_flops_of_latent_attention_have_keys_and_values_of_their_own_widths():
    model = TINY.model_copy(update={"mla": LATENT})
    matrices = 48 * 20 + 20 * 12 * 16 + 48 * (14 + 6) + 14 * 12 * (10 + 8) + 12 * 8 * 48
    assert layer_matmul_parameters(model, 0) == matrices + 3 * 48 * 80
    products = 5 * 2 * (128 / 2) * 12 * ((10 + 6) + 8)  # layers x multiply and add x keys seen x heads x widths
    assert attention_flops_per_token(model, 128) == products
    assert forward_flops_per_token(model, 128) == 2 * matmul_parameters(model) + products


def test_a_further_token_takes_a_block_a_projection_and_the_head_once_more():
    plain, further = TINY, TINY.model_copy(update={"mtp": 2})
    depth = layer_matmul_parameters(TINY, 0) + 2 * 48 * 48 + 1003 * 48
    assert mtp_matmul_parameters(further) == matmul_parameters(further) - matmul_parameters(plain) == 2 * depth
    assert attention_flops_per_token(further, 64) * 5 == attention_flops_per_token(plain, 64) * 7


def test_deepseek_v3_takes_250_gflop_a_token_of_4096_without_its_further_prediction():
    """Worked out by hand from its config.json: 36.6 B weights multiply (all but the embedding), 61 layers attend."""
    model = preset("deepseek-v3").model_copy(update={"mtp": 0})
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    dense, mixture = 3 * 7168 * 18432, 256 * 7168 + 9 * 3 * 7168 * 2048
    weights = 61 * attention + 3 * dense + 58 * mixture + 129280 * 7168
    assert matmul_parameters(model) == weights
    assert train_flops_per_token(model, 4096) == 6 * weights + 3 * 61 * 4096 * 128 * (192 + 128)
    assert f"{train_flops_per_token(model, 4096) / 1e9:.1f}" == "250.4"


def test_an_unknown_vocabulary_is_asked_for():
    with pytest.raises(UserError, match=r"model\.vocab is auto"):
        parameters(TINY.model_copy(update={"vocab": "auto"}))
