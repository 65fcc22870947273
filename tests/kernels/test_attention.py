"""Attention inside documents against the formula, on every path that a CPU can run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from fivefold.kernels.alibi import alibi_slopes
from fivefold.kernels.attention import (
    BLOCK,
    Blocks,
    Causal,
    Dense,
    Rows,
    alibi_by_index,
    attend,
    attention_mask,
    blocks_of,
    document_starts,
)
from tests.kernels.formula import documents, formula

LENGTHS = [[5, 1, 1, 9], [16], [1, 15], [7, 9]]


def whole_rows(documents_bs: torch.Tensor) -> Rows:
    return Rows(torch.arange(documents_bs.shape[1]), documents_bs)


def example(heads: int = 6, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(4, 16, n, 8, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention_and_its_gradients_are_the_formula_s(packed: bool, alibi: bool, kv_heads: int) -> None:
    q, k, v = example(kv_heads=kv_heads)
    documents_bs = documents(LENGTHS) if packed else None
    slopes = alibi_slopes(6) if alibi else None
    out = attend(q, k, v, attention_mask(q.flatten(2), documents_bs, slopes))
    expected = formula(q, k, v, documents_bs, slopes)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    gradient = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(value, (q, k, v), gradient) for value in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("alibi", [False, True])
def test_a_packed_row_is_its_documents_one_by_one(alibi: bool) -> None:
    q, k, v = example()
    slopes = alibi_slopes(6) if alibi else None
    together = attend(q, k, v, attention_mask(q.flatten(2), documents(LENGTHS), slopes))
    for row, lengths in enumerate(LENGTHS):
        parts = [x[row : row + 1].split(lengths, dim=1) for x in (q, k, v)]
        alone = [attend(*part, attention_mask(part[0].flatten(2), None, slopes)) for part in zip(*parts, strict=True)]
        torch.testing.assert_close(together[row : row + 1], torch.cat(alone, 1), rtol=1e-11, atol=1e-12)


def test_one_document_a_row_needs_no_mask() -> None:
    assert isinstance(attention_mask(torch.zeros(2, 16, 48), None, None), Causal)
    mask = attention_mask(torch.zeros(2, 16, 48), None, alibi_slopes(6))
    assert isinstance(mask, Dense)
    assert mask.bias_bhss.shape == (1, 6, 16, 16)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
def test_bf16_is_close_to_float64(packed: bool, alibi: bool) -> None:
    q, k, v = example(dtype=torch.bfloat16)
    documents_bs = documents(LENGTHS) if packed else None
    slopes = alibi_slopes(6) if alibi else None
    out = attend(q, k, v, attention_mask(q.flatten(2), documents_bs, slopes))
    assert out.dtype == torch.bfloat16
    expected = formula(q.double(), k.double(), v.double(), documents_bs, slopes)
    assert (out.double() - expected).norm() / expected.norm() < 6e-3


def test_alibi_in_bf16_still_tells_far_neighbours_apart() -> None:
    """A bias of slope x key position kept in bf16 would be equal for keys 8,190 and 8,191."""
    mask = attention_mask(torch.zeros(1, 2048, 2, dtype=torch.bfloat16), None, [0.5, 0.25])
    assert isinstance(mask, Dense)
    steps = mask.bias_bhss[0, :, 2047].diff(dim=-1)
    assert torch.equal(steps, torch.tensor([[0.5], [0.25]]).expand(2, 2047))


def test_starts_of_documents() -> None:
    starts = document_starts(documents([[3, 1, 2], [6], [1, 1, 4]]))
    assert starts.tolist() == [[0, 0, 0, 3, 4, 4], [0] * 6, [0, 1, 2, 2, 2, 2]]


@pytest.mark.parametrize(
    "rows",
    [
        [[4 * BLOCK], [BLOCK] * 4],
        [[1, BLOCK - 1, BLOCK + 1, 2 * BLOCK - 1], [BLOCK - 1, 1, 2 * BLOCK, BLOCK]],
        [[300, 11, 1, 100], [200, 212]],
    ],
)
def test_blocks_of_documents_are_those_of_the_whole_mask(rows: list[list[int]]) -> None:
    """torch builds the same lists from the N x N mask, which the GPU must never hold."""
    documents_bs = documents(rows)
    length = documents_bs.shape[1]
    ours = blocks_of(whole_rows(documents_bs))
    theirs = create_block_mask(ours.mask_mod, len(rows), None, length, length, device="cpu")
    assert ours.shape == theirs.shape
    for counts, indices in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"),
        ("full_q_num_blocks", "full_q_indices"),
    ):
        assert torch.equal(getattr(ours, counts), getattr(theirs, counts))
        used = torch.arange(getattr(ours, indices).shape[-1]) < getattr(ours, counts)[..., None]
        assert torch.equal(getattr(ours, indices)[used], getattr(theirs, indices)[used])


@pytest.mark.parametrize("alibi", [False, True])
def test_the_gpu_s_path_for_packed_rows_computes_the_same_uncompiled(alibi: bool) -> None:
    q, k, v = (x.detach() for x in example(dtype=torch.float32))
    documents_bs = documents(LENGTHS)
    slopes = alibi_slopes(6) if alibi else None
    mask = Blocks(
        blocks_of(whole_rows(documents_bs)),
        alibi_by_index(torch.tensor(slopes)) if slopes else None,
    )
    with torch.compiler.set_stance("force_eager"):
        out = attend(q, k, v, mask)
    torch.testing.assert_close(out, formula(q, k, v, documents_bs, slopes), rtol=1e-4, atol=1e-5)
