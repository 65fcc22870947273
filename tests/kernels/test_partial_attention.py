"""Attention over a part of the keys: each kernel's output, log-sum-exp and gradients, and how parts make a whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from fivefold.kernels import partial_attention
from fivefold.kernels.alibi import alibi_slopes
from fivefold.kernels.attention import (
    BLOCK,
    Blocks,
    Causal,
    Dense,
    Rows,
    alibi_by_position,
    blocks_between,
    dense_bias,
)
from fivefold.kernels.partial_attention import ALL, Gradients, PartMask, Piece, Running, Whole, backward, forward
from tests.kernels.formula import documents, formula

LENGTHS = [[5, 1, 1, 9, 8], [24], [1, 23], [8, 16]]
HEADS, KV_HEADS = 6, 2


def example(dtype: torch.dtype = torch.float64, length: int = 24) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output, heads first."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(len(LENGTHS), n, length, 8, dtype=torch.float64, generator=generator).to(dtype)
        for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    return q, k, v, dout


def rows(first: int, last: int, documents_bs: Tensor | None) -> Rows:
    return Rows(torch.arange(first, last), None if documents_bs is None else documents_bs[:, first:last])


def dense(queries: Rows, keys: Rows, alibi: bool) -> Dense:
    slopes_h = torch.tensor(alibi_slopes(HEADS), dtype=torch.float64) if alibi else None
    return Dense(dense_bias(queries, keys, slopes_h, torch.float64))


def in_pieces(pieces: list[Piece], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients, put together from pieces."""
    running = Running(q, len(pieces))
    running.add(pieces, q, k, v)
    gradients = Gradients(dout, q, running.output.to(q.dtype), running.lse_bhn, len(pieces))
    dk, dv = (torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v))
    gradients.add(pieces, k, v, dk, dv)
    return running.output, gradients.of_queries, dk, dv


def at_once(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, documents_bs: Tensor | None, alibi: bool
) -> tuple[Tensor, ...]:
    """Output and gradients by the formula, in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    slopes = alibi_slopes(HEADS) if alibi else None
    out = formula(*(x.transpose(1, 2) for x in leaves), documents_bs, slopes).transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.double())


def worst(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest relative error, by norm."""
    return max(float((ours - theirs).norm() / theirs.norm()) for ours, theirs in zip(found, expected, strict=True))


CAUSAL_IN_FOUR = [
    Piece(slice(8, None), slice(8), Whole()),
    Piece(slice(16, None), slice(8, 16), Whole()),
    *(Piece(slice(start, start + 8), slice(start, start + 8), Causal()) for start in (0, 8, 16)),
]


def test_causal_attention_in_pieces_is_the_whole() -> None:
    inputs = example()
    assert worst(in_pieces(CAUSAL_IN_FOUR, *inputs), at_once(*inputs, None, False)) < 1e-13


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cuts", [(0, 8, 24), (0, 7, 8, 24), (0, 24)])
def test_masked_attention_over_parts_of_the_keys_is_the_whole(packed: bool, alibi: bool, cuts: tuple[int, ...]) -> None:
    """Some of the parts are seen by no query of a row, some by none at all."""
    inputs, documents_bs = example(), documents(LENGTHS) if packed else None
    queries = rows(0, 24, documents_bs)
    pieces = [
        Piece(ALL, slice(first, last), dense(queries, rows(first, last, documents_bs), alibi))
        for first, last in itertools.pairwise(cuts)
    ]
    expected = at_once(*inputs, documents_bs, alibi)
    assert worst(in_pieces(pieces, *inputs), expected) < 1e-13
    assert worst(in_pieces(pieces[::-1], *inputs), expected) < 1e-13


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_other_formats_are_close_to_float64(dtype: torch.dtype, bound: float) -> None:
    inputs = example(dtype)
    found = in_pieces(CAUSAL_IN_FOUR, *inputs)
    assert {x.dtype for x in found} == {torch.float32}
    assert worst(found, at_once(*inputs, None, False)) < bound


def test_a_query_that_sees_nothing_has_no_output_and_leaves_no_gradient() -> None:
    q, k, v, dout = example()
    bias = torch.zeros(1, 1, 24, 24, dtype=torch.float64)
    bias[:, :, 3] = float("-inf")
    for compute, derive in (
        (forward, backward),
        (partial_attention._written_out, partial_attention._written_out_backward),
    ):
        out, lse = compute(q, k, v, Dense(bias))
        assert not out[:, :, 3].any()
        assert (lse[:, :, 3] == float("-inf")).all()
        assert lse[:, :, :3].isfinite().all()
        dq, dk, dv = derive(dout, q, k, v, out, lse, Dense(bias))
        without = dout.clone()
        without[:, :, 3] = 0
        assert not dq[:, :, 3].any()
        assert all(map(torch.equal, (dk, dv), derive(without, q, k, v, out, lse, Dense(bias))[1:]))


def test_nothing_seen_by_any_piece_merges_to_nothing() -> None:
    q, k, v, _ = example()
    nothing = Piece(ALL, ALL, Dense(torch.full((1, 1, 24, 24), float("-inf"), dtype=torch.float64)))
    running = Running(q, 2)
    running.add([nothing, nothing], q, k, v)
    assert not running.output.any()
    assert (running.lse_bhn == float("-inf")).all()


def test_scores_far_apart_do_not_overflow() -> None:
    """Log-sum-exps of +-1,000: their exponentials are not numbers of fp32."""
    out, lse = torch.zeros(1, 1, 2, 4), torch.tensor([[[1000.0, -1000.0]]])
    partial_attention.merge_(out, lse, torch.ones(1, 1, 2, 4), torch.tensor([[[-1000.0, 1000.0]]]))
    assert out[0, 0].tolist() == [[0.0] * 4, [1.0] * 4]
    assert lse.tolist() == [[[1000.0, 1000.0]]]


@pytest.mark.parametrize("alibi", [False, True])
def test_the_formula_for_fp64_on_a_gpu_is_the_cpu_s_kernel(alibi: bool) -> None:
    q, k, v, dout = example()
    documents_bs = documents(LENGTHS)
    mask = dense(rows(8, 24, documents_bs), rows(0, 8, documents_bs), alibi)
    q, dout, k, v = q[:, :, 8:], dout[:, :, 8:], k[:, :, :8], v[:, :, :8]
    theirs, ours = forward(q, k, v, mask), partial_attention._written_out(q, k, v, mask)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    whole = (torch.randn_like(q), torch.logaddexp(theirs[1], torch.randn_like(theirs[1])))
    ours = partial_attention._written_out_backward(dout, q, k, v, *whole, mask)
    torch.testing.assert_close(ours, backward(dout, q, k, v, *whole, mask), rtol=1e-12, atol=1e-12)


def blocks(queries: Rows, keys: Rows, alibi: bool) -> Blocks:
    slopes_h = torch.tensor(alibi_slopes(HEADS)) if alibi else None
    mask = blocks_between(queries, keys)
    return Blocks(mask, None if slopes_h is None else alibi_by_position(slopes_h, queries, keys))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
def test_the_gpu_s_blocks_give_the_same_output_and_log_sum_exp_uncompiled(packed: bool, alibi: bool) -> None:
    q, k, v, _ = example(torch.float32)
    documents_bs = documents(LENGTHS) if packed else None
    queries, keys = rows(8, 24, documents_bs), rows(0, 8, documents_bs)
    parts = q[:, :, 8:], k[:, :, :8], v[:, :, :8]
    with torch.compiler.set_stance("force_eager"):
        ours = forward(*parts, blocks(queries, keys, alibi))
    theirs = forward(*(x.double() for x in parts), dense(queries, keys, alibi))
    torch.testing.assert_close(tuple(x.double() for x in ours), theirs, rtol=1e-4, atol=1e-5)


def test_the_blocks_gradients_follow_from_output_and_log_sum_exp_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex has no backward on a CPU: the formula stands in for it."""
    queries, keys = rows(8, 24, None), rows(0, 8, None)
    masked = dense(queries, keys, alibi=True)
    monkeypatch.setattr(
        partial_attention, "_flex", lambda q, k, v, mask: partial_attention._written_out(q, k, v, masked)
    )
    q, k, v, dout = example()
    q, dout, k, v = q[:, :, 8:], dout[:, :, 8:], k[:, :, :8], v[:, :, :8]
    whole = (torch.randn_like(q), torch.logaddexp(forward(q, k, v, masked)[1], torch.randn(q.shape[:-1]).double()))
    ours = backward(dout, q, k, v, *whole, blocks(queries, keys, alibi=True))
    torch.testing.assert_close(ours, backward(dout, q, k, v, *whole, masked), rtol=1e-12, atol=1e-12)


def chunks(length: int, *numbers: int) -> Tensor:
    """The positions of some chunks of a sequence."""
    return torch.cat([torch.arange(number * length, (number + 1) * length) for number in numbers])


def listed(mask: BlockMask) -> list[Tensor]:
    """0 or 1 for each block: met in part, seen whole; by queries, then by keys."""
    found = []
    for counts, indices in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
        (mask.q_num_blocks, mask.q_indices),
        (mask.full_q_num_blocks, mask.full_q_indices),
    ):
        assert counts is not None
        assert indices is not None
        chosen = (torch.arange(indices.shape[-1]) < counts[..., None]).int()
        found.append(torch.zeros_like(chosen).scatter(-1, indices.long(), chosen))
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("query_positions", "key_positions"),
    [
        (chunks(2 * BLOCK, 1, 6), chunks(2 * BLOCK, 1, 6)),
        (chunks(2 * BLOCK, 1, 6), chunks(2 * BLOCK, 0, 7)),
        (chunks(2 * BLOCK, 1, 6), chunks(2 * BLOCK, 2, 5)),
        (torch.arange(512, 1024), torch.arange(0, 512)),
        (torch.arange(0, 512), torch.arange(512, 1024)),
        (torch.arange(300, 301), torch.arange(0, 1600)),
        (torch.arange(200, 500), torch.arange(0, 1600)),
    ],
)
def test_blocks_between_rows_are_those_of_the_whole_mask(
    query_positions: Tensor, key_positions: Tensor, packed: bool
) -> None:
    """torch builds the same lists from the whole mask, which the GPU must never hold."""
    ours, theirs = both_masks(query_positions, key_positions, packed)
    assert ours.shape == theirs.shape
    assert all(map(torch.equal, listed(ours), listed(theirs)))


@pytest.mark.parametrize("keys", [(1, 6), (0, 7), (2, 5)])
def test_a_block_over_the_gap_between_two_chunks_may_be_met_in_vain_but_none_is_left_out(keys: tuple[int, int]) -> None:
    ours, theirs = both_masks(chunks(200, 1, 6), chunks(200, *keys), packed=True)
    (met, whole, _, _), (needed, wholly, _, _) = listed(ours), listed(theirs)
    assert torch.equal(whole, wholly)
    assert (met >= needed).all()


def both_masks(query_positions: Tensor, key_positions: Tensor, packed: bool) -> tuple[BlockMask, BlockMask]:
    """Ours, and torch's from the whole mask."""
    documents_bs = documents([[300, 11, 1, 100, 2 * BLOCK, 1380], [2048], [BLOCK] * 16])
    queries, keys = (
        Rows(positions, documents_bs[:, positions] if packed else None)
        for positions in (query_positions, key_positions)
    )
    ours = blocks_between(queries, keys)
    lengths = len(query_positions), len(key_positions)
    return ours, create_block_mask(ours.mask_mod, 3 if packed else None, None, *lengths, device="cpu")


MASKS: list[PartMask] = [Causal(), Whole()]


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS, ids=["causal", "whole"])
@pytest.mark.parametrize("size", [64, 80, 128, 256, 20])
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_the_gpu_s_kernels_of_each_head_size_are_close_to_float64(mask: PartMask, size: int, kv_heads: int) -> None:
    """256 and 20 are FlashAttention's, the others cuDNN's; k and v are slices, as a ring has them."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((2, 512, 8, size), (2, 2, 1024, kv_heads, size), (2, 512, 8, size))
    q, kv, dout = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    q, dout, (k, v) = q.transpose(1, 2), dout.transpose(1, 2), kv.transpose(2, 3)[..., 512:, :]
    out, lse = forward(q, k, v, mask)
    bias = dense_bias(*(Rows(torch.arange(512, device="cuda"), None),) * 2, None, torch.float64)
    wide = Dense(bias if isinstance(mask, Causal) else torch.zeros_like(bias))
    expected, expected_lse = partial_attention._written_out(q.double(), k.double(), v.double(), wide)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-3)
    gradients = backward(dout, q, k, v, out, lse, mask)
    double = [x.double() for x in (dout, q, k, v)]
    theirs = partial_attention._written_out_backward(*double, expected, expected_lse, wide)
    assert worst((out, *gradients), (expected, *theirs)) < 8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
def test_the_gpu_s_blocks_are_close_to_float64(dtype: torch.dtype, packed: bool, alibi: bool) -> None:
    """Queries of chunks 1 and 6 over keys of chunks 0 and 7: some blocks whole, some in part, some not at all."""
    documents_bs = documents([[1600], [300, 11, 1, 100, 256, 932]]).cuda() if packed else None
    held = [
        torch.cat((torch.arange(200) + 200 * first, torch.arange(200) + 200 * last)).cuda()
        for first, last in ((1, 6), (0, 7))
    ]
    queries, keys = (Rows(at, None if documents_bs is None else documents_bs[:, at]) for at in held)
    slopes_h = torch.tensor(alibi_slopes(8), device="cuda", dtype=torch.float64) if alibi else None
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v, dout = (torch.randn(2, n, 400, 64, generator=generator, device="cuda").to(dtype) for n in (8, 2, 2, 8))
    alibi_score = None if slopes_h is None else alibi_by_position(slopes_h.float(), queries, keys)
    mask, wide = (
        Blocks(blocks_between(queries, keys), alibi_score),
        Dense(dense_bias(queries, keys, slopes_h, torch.float64)),
    )
    double = [x.double() for x in (dout, q, k, v)]
    out, lse = forward(q, k, v, mask)
    expected, expected_lse = partial_attention._written_out(*double[1:], wide)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=5e-3)
    whole = (
        torch.randn(q.shape, generator=generator, device="cuda"),
        torch.randn(q.shape[:-1], generator=generator, device="cuda") + 8,
    )
    gradients = backward(dout, q, k, v, whole[0].to(dtype), whole[1], mask)
    theirs = partial_attention._written_out_backward(*double, whole[0].to(dtype).double(), whole[1].double(), wide)
    assert worst((out, *gradients), (expected, *theirs)) < (8e-3 if dtype == torch.bfloat16 else 2e-3)
