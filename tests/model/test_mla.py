"""Latent attention against the formula in float64 and against transformers, and what it keeps for backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from fivefold.config.run import LatentAttention as Sizes
from fivefold.config.run import Model, Recompute, RopeScaling
from fivefold.kernels.attention import Blocks, Rows, blocks_of
from fivefold.kernels.latent_heads import latent_heads
from fivefold.kernels.rotary import rotation
from fivefold.model import rope
from fivefold.model.activations import activation_policies
from fivefold.model.attention import Context, context
from fivefold.model.init import initialize
from fivefold.model.mla import LatentAttention
from fivefold.model.part import WHOLE
from fivefold.model.spec import layer_shapes
from tests.kernels.formula import documents, formula
from tests.memory import bytes_left

YARN = RopeScaling(type="yarn", factor=8.0, original_context=8, mscale=1.5, mscale_all_dim=0.7)
MODEL = Model(
    layers=1,
    hidden=24,
    heads=6,
    ffn=8,
    vocab=8,
    norm_eps=1e-6,
    init_std=0.3,
    rope_scaling=YARN,
    mla=Sizes(q_rank=10, kv_rank=7, plain=6, rotated=4, value=5),
)
DIRECT = MODEL.model_copy(update={"mla": Sizes(kv_rank=7, plain=6, rotated=4, value=5)})
UNSTRETCHED = MODEL.model_copy(update={"rope_scaling": None})
MODELS = {"yarn": MODEL, "yarn, no short vector of queries": DIRECT, "no yarn": UNSTRETCHED}
models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
LENGTHS = [[5, 1, 1, 4], [11], [3, 8]]


def attention_of(model: Model, dtype: torch.dtype = torch.float64) -> LatentAttention:
    attention = LatentAttention(model)
    initialize(dict(attention.named_parameters()), model, seed=0)
    for name, parameter in attention.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data += torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1))
    return attention.to(dtype)


def context_of(model: Model, x: Tensor, documents_bs: Tensor | None = None) -> Context:
    """Of one rank that has the sequences x (b, s, d) whole."""
    return context(model, WHOLE, x, torch.arange(x.shape[1]), documents_bs, x.shape[:2])


def example(dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(3, 11, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def written_out(attention: LatentAttention, model: Model, x_bsd: Tensor, documents_bs: Tensor | None) -> Tensor:
    """One head after the other, channels turned as complex numbers."""
    weights, mla = dict(attention.named_parameters()), model.mla
    assert mla is not None

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + model.norm_eps).rsqrt() * weight

    def turned(x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1]).expand(x.shape[:2])
        if documents_bs is not None:
            firsts = [[row.tolist().index(document) for document in row.tolist()] for row in documents_bs]
            positions = positions - torch.tensor(firsts)
        angles = positions[..., None] * rope.frequencies(model, torch.float64)
        pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], -1) * rope.attention_factor(model)

    if mla.q_rank is None:
        queries = x_bsd @ weights["q.weight"].T
    else:
        queries = norm(x_bsd @ weights["q_a.weight"].T, weights["q_a_norm.weight"]) @ weights["q_b.weight"].T
    short, key = (x_bsd @ weights["kv_a.weight"].T).split([mla.kv_rank, mla.rotated], -1)
    pairs = norm(short, weights["kv_a_norm.weight"]) @ weights["kv_b.weight"].T
    heads = []
    for q, kv in zip(queries.chunk(model.heads, -1), pairs.chunk(model.heads, -1), strict=True):
        q = torch.cat([q[..., : mla.plain], turned(q[..., mla.plain :])], -1) * rope.score_factor(model)
        k = torch.cat([kv[..., : mla.plain], turned(key)], -1)
        heads.append(formula(q[:, :, None], k[:, :, None], kv[:, :, None, mla.plain :], documents_bs, None)[:, :, 0])
    return torch.cat(heads, -1) @ weights["output.weight"].T


@models
def test_parameters_are_those_of_the_description(model: Model) -> None:
    found = {f"attention.{name}": tuple(p.shape) for name, p in LatentAttention(model).named_parameters()}
    expected = {name: shape for name, shape in layer_shapes(model, 0).items() if name.startswith("attention.")}
    assert list(found.items()) == list(expected.items())


@models
@pytest.mark.parametrize("packed", [False, True])
def test_output_and_gradients_are_the_formula_s(model: Model, packed: bool) -> None:
    attention, x = attention_of(model), example()
    documents_bs = documents(LENGTHS) if packed else None
    out = attention(x.flatten(0, 1), context_of(model, x, documents_bs)).view_as(x)
    expected = written_out(attention, model, x, documents_bs)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    inputs, gradient = (x, *attention.parameters()), torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(value, inputs, gradient) for value in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def of_transformers(model: Model, ours: LatentAttention) -> tuple[DeepseekV3Attention, DeepseekV3RotaryEmbedding]:
    """Their module with our weights: the rows that turn are in pairs there, and in halves here."""
    mla, scaling = model.mla, model.rope_scaling
    assert mla is not None
    parameters = {"rope_type": "default", "rope_theta": model.rope_theta}
    if scaling is not None:
        parameters |= {"rope_type": "yarn", "original_max_position_embeddings": scaling.original_context}
        parameters |= {key: getattr(scaling, key) for key in ("factor", "mscale", "mscale_all_dim")}
    config = DeepseekV3Config(
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads,
        q_lora_rank=mla.q_rank,
        kv_lora_rank=mla.kv_rank,
        qk_nope_head_dim=mla.plain,
        qk_rope_head_dim=mla.rotated,
        v_head_dim=mla.value,
        rope_interleave=True,
        rope_parameters=parameters,
        attn_implementation="eager",
    )
    theirs = DeepseekV3Attention(config, 0)

    def in_pairs(rows: Tensor, blocks: int) -> Tensor:
        """The last `rotated` rows of each of so many blocks."""
        by_block = rows.detach().clone().unflatten(0, (blocks, -1))
        halves = by_block[:, -mla.rotated :].unflatten(1, (2, -1))
        by_block[:, -mla.rotated :] = halves.transpose(1, 2).flatten(1, 2)
        return by_block.flatten(0, 1)

    weights = dict(ours.named_parameters())
    names = {"kv_a_layernorm": "kv_a_norm", "kv_b_proj": "kv_b", "o_proj": "output"}
    state = {f"{theirs}.weight": weights[f"{ours}.weight"] for theirs, ours in names.items()}
    state["kv_a_proj_with_mqa.weight"] = in_pairs(weights["kv_a.weight"], 1)
    if mla.q_rank is None:
        state["q_proj.weight"] = in_pairs(weights["q.weight"], model.heads)
    else:
        state["q_a_proj.weight"], state["q_a_layernorm.weight"] = weights["q_a.weight"], weights["q_a_norm.weight"]
        state["q_b_proj.weight"] = in_pairs(weights["q_b.weight"], model.heads)
    theirs.load_state_dict(state)
    return theirs, DeepseekV3RotaryEmbedding(config)


@models
def test_it_is_transformers_attention_of_deepseek_v3(model: Model) -> None:
    attention, x = attention_of(model, torch.float32), example(torch.float32)
    theirs, rotary = of_transformers(model, attention)
    unseen = torch.full((11, 11), float("-inf")).triu(1)[None, None]
    expected = theirs(x, rotary(x, torch.arange(11)[None]), unseen)[0]
    out = attention(x.flatten(0, 1), context_of(model, x)).view_as(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    gradient = torch.randn_like(out)
    ours, other = (torch.autograd.grad(value, x, gradient)[0] for value in (out, expected))
    torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-5)


def test_kernels_that_take_narrow_values_get_them_as_they_are() -> None:
    """On a GPU packed rows go to one of them; here it runs uncompiled."""
    attention, x = attention_of(MODEL, torch.float32), example(torch.float32).detach()
    documents_bs = documents(LENGTHS)
    shared = context_of(MODEL, x, documents_bs)
    expected = attention(x.flatten(0, 1), shared)
    shared.mask = Blocks(blocks_of(Rows(torch.arange(11), documents_bs)), None)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = attention(x.flatten(0, 1), shared)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_heads_are_rounded_once_in_bf16() -> None:
    """Queries are turned and scaled in one go: a second rounding would be seen as an error above half a step."""
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(1, 9, 3, width, generator=generator).bfloat16() for width in (10, 11))
    key = torch.randn(1, 9, 4, generator=generator).bfloat16()
    tables = rotation(torch.arange(9), torch.tensor([1.0, 0.1], dtype=torch.float64))
    wide = latent_heads(q.double(), kv.double(), key.double(), tables, 1.7, 10)
    heads = latent_heads(q, kv, key, tuple(table.float() for table in tables), 1.7, 10)
    for found, expected in zip(heads, wide, strict=True):
        assert found.dtype == torch.bfloat16
        assert ((found.double() - expected).abs() <= 2.0**-8 * expected.abs() * (1 + 1e-4)).all()


def bytes_kept(mode: str) -> int:
    """Of a layer's latent attention over 512 tokens, in fp32."""
    model = MODEL.model_copy(update={"mla": Sizes(q_rank=20, kv_rank=12, plain=20, rotated=12, value=16)})
    (policy,) = activation_policies(Recompute(mode=mode), (), range(1))
    attention = LatentAttention(model, policy=policy)
    initialize(dict(attention.named_parameters()), model, seed=0)
    x = torch.randn(512, 24, requires_grad=True)
    shared = context_of(model, x.detach().view(1, 512, 24))
    runs = [bytes_left(lambda: policy.run(attention, x, shared))[0] for _ in range(2)]
    return runs[1]


SHORT = 20 + 12 + 12
"""Channels of the two short vectors and the key that turns, before the norms."""
QUERIES, VALUES, PRODUCTS = 6 * 32, 6 * 16, 6 * (32 + 20 + 16)
LOG_SUM_EXP, UPDATE = 6, 24


def test_products_are_not_kept_beside_the_heads_made_of_them() -> None:
    """Values and output are as wide as keys for a kernel that wants it so, and the output is kept cut as well.

    What a CPU runs uncompiled keeps the normed vectors without their weight too.
    """
    normed, uncompiled, wide = 20 + 12, 20 + 12 + 2, 4 * QUERIES + VALUES
    channels = SHORT + normed + uncompiled + wide + LOG_SUM_EXP + UPDATE
    assert bytes_kept("none") == pytest.approx(512 * 4 * channels, rel=0.02)


def test_selective_recompute_keeps_products_and_one_output() -> None:
    channels = SHORT + PRODUCTS + QUERIES + LOG_SUM_EXP + UPDATE
    assert bytes_kept("selective") == pytest.approx(512 * 4 * channels, rel=0.02)


def test_values_wider_than_keys_are_no_case() -> None:
    sizes = Sizes(kv_rank=7, plain=3, rotated=4, value=8)
    with pytest.raises(AssertionError, match="values wider than keys"):
        LatentAttention(MODEL.model_copy(update={"mla": sizes}))
