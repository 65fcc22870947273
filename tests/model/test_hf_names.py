"""Our fused parameters and Hugging Face's separate ones hold the same rows."""

import pytest
import torch

from fivefold.config.run import Model
from fivefold.model.hf_bloom import BLOOM
from fivefold.model.hf_llama import LLAMA
from fivefold.model.spec import parameter_shapes

GROUPED = Model(layers=2, hidden=40, heads=6, kv_heads=2, head_dim=4, ffn=5, vocab=13, bias=True)


def entry(model: Model, ours: str):
    return next(entry for entry in LLAMA.entries(model) if entry.ours == ours)


@pytest.mark.parametrize(("name", "columns"), [("attention.qkv.weight", (40,)), ("attention.qkv.bias", ())])
def test_each_key_value_head_stands_with_its_query_heads(name, columns):
    """Rows are numbered by what they are: ours [kv head][three queries, key, value][element of the head]."""
    qkv = entry(GROUPED, f"layers.1.{name}")
    queries, keys, values = (torch.randn(rows, *columns) for rows in (24, 8, 8))
    expected = []
    for kv_head in range(2):
        for query in range(3):
            expected += [queries[(kv_head * 3 + query) * 4 + i] for i in range(4)]
        expected += [keys[kv_head * 4 + i] for i in range(4)]
        expected += [values[kv_head * 4 + i] for i in range(4)]
    assert torch.equal(qkv.fuse([queries, keys, values]), torch.stack(expected))
    kind = name.split(".")[-1]
    assert list(qkv.theirs) == [f"model.layers.1.self_attn.{part}_proj.{kind}" for part in "qkv"]


@pytest.mark.parametrize(("name", "columns"), [("ffn.gate_up.weight", (40,)), ("ffn.gate_up.bias", ())])
def test_gate_and_up_alternate_row_by_row(name, columns):
    gate, up = torch.randn(5, *columns), torch.randn(5, *columns)
    fused = entry(GROUPED, f"layers.0.{name}").fuse([gate, up])
    assert torch.equal(fused[0::2], gate)
    assert torch.equal(fused[1::2], up)


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("adaptor", [LLAMA, BLOOM])
def test_splitting_undoes_fusing_for_every_parameter(adaptor, kv_heads):
    model = GROUPED.model_copy(update={"kv_heads": kv_heads} if adaptor is LLAMA else {"activation": "gelu"})
    for item in adaptor.entries(model):
        ours = torch.randn(parameter_shapes(model)[item.ours])
        parts = list(item.split(ours))
        assert [tuple(part.shape) for part in parts] == list(item.theirs.values())
        assert torch.equal(item.fuse(parts), ours)


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_one_entry_and_every_name_is_used_once(tied):
    model = GROUPED.model_copy(update={"tied": tied})
    entries = LLAMA.entries(model)
    theirs = [name for item in entries for name in item.theirs]
    assert [item.ours for item in entries] == list(parameter_shapes(model))
    assert len(set(theirs)) == len(theirs)
    assert (LLAMA.head in theirs) is not tied
