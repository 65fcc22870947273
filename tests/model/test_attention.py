"""What a block's attention does with the fused projection, the norms of queries and keys, and the positions."""

import torch

from fivefold.config.run import Model
from fivefold.model.attention import Attention, Context, context
from fivefold.model.init import initialize
from fivefold.model.part import WHOLE

MODEL = Model(layers=1, hidden=24, heads=6, kv_heads=2, head_dim=8, ffn=8, vocab=8)


def attention_of(model: Model) -> Attention:
    attention = Attention(model).double()
    initialize(dict(attention.named_parameters()), model.model_copy(update={"init_std": 0.3}), seed=0)
    return attention


def context_of(model: Model, x: torch.Tensor, documents: torch.Tensor | None = None) -> Context:
    """Of one rank that has the sequences x (b, s, d) whole."""
    return context(model, WHOLE, x, torch.arange(x.shape[1]), documents, x.shape[:2])


def test_rows_of_the_fused_projection_are_each_key_value_head_with_its_queries() -> None:
    """Written out with separate weights: rows are [kv head][queries..., key, value][head_dim]."""
    attention = attention_of(MODEL)
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    by_head = attention.qkv.weight.view(2, 5, 8, 24)
    shared = context_of(MODEL.model_copy(update={"position": "alibi"}), x)
    scores_bias = shared.mask.bias_bhss[0]  # type: ignore[union-attr]
    heads = []
    for head in range(6):
        group = by_head[head // 3]
        q, k, v = x @ group[head % 3].T, x @ group[3].T, x @ group[4].T
        heads.append(torch.softmax(q @ k.transpose(1, 2) / 8**0.5 + scores_bias[head], -1) @ v)
    expected = torch.cat(heads, -1) @ attention.output.weight.T
    torch.testing.assert_close(attention(x[0], shared), expected[0], rtol=1e-11, atol=1e-13)


def test_positions_restart_in_each_document() -> None:
    x = torch.zeros(2, 6, 24)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]], dtype=torch.int32)
    packed, plain = context_of(MODEL, x, documents).turn, context_of(MODEL, x).turn
    assert packed is not None
    assert plain is not None
    for ours, theirs in zip(packed, plain, strict=True):
        assert torch.equal(ours[0], theirs[[0, 1, 2, 0, 1, 0]])
        assert torch.equal(ours[1], theirs[[0, 0, 1, 2, 3, 4]])


def test_norms_of_queries_and_keys_make_scores_blind_to_their_length() -> None:
    model = MODEL.model_copy(update={"qk_norm": True, "norm_eps": 0.0})
    attention = attention_of(model)
    x = torch.randn(1, 5, 24, dtype=torch.float64)
    before = attention(x[0], context_of(model, x))
    with torch.no_grad():
        attention.qkv.weight.view(2, 5, 8, 24)[:, :4].mul_(3)  # queries and keys, not values
    torch.testing.assert_close(attention(x[0], context_of(model, x)), before, rtol=1e-10, atol=1e-12)
