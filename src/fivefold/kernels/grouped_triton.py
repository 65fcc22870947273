"""What torch's grouped product lacks, on CUDA: imported when the first CUDA tensor comes.

The weight gradient in fp32, made and added up in one kernel: torch's is rounded to bf16, and to widen and add it takes
longer than the product. And zeros for the experts that got no rows, whose gradient torch's product leaves as it found
the memory. Which experts they are is known on the device alone, so that every expert is visited, and most visits return
at once.
"""

# r rows  e experts  o output width  i input width

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
VISITS = 32
"""Programs an expert, which share out its elements."""


TILE = {"BLOCK_O": 128, "BLOCK_I": 256, "BLOCK_R": 64, "num_warps": 8, "num_stages": 4}
"""Of six that were tried on an H200, the fastest: 350 to 390 TFLOP/s, and exact as fp32 sums are."""


def add_weight_gradient(total_eoi: Tensor | None, g_ro: Tensor, x_ri: Tensor, ends_e: Tensor) -> Tensor:
    """total + g^T x of each expert's rows, in place; without a total, a new one, zero for an expert without rows.

    The rows are bf16 and contiguous, the total fp32.
    """
    adds = total_eoi is not None
    if total_eoi is None:
        total_eoi = g_ro.new_empty(len(ends_e), g_ro.shape[1], x_ri.shape[1], dtype=torch.float32)
    _, o, i = total_eoi.shape
    tiles = len(ends_e) * triton.cdiv(o, TILE["BLOCK_O"]) * triton.cdiv(i, TILE["BLOCK_I"])
    _add_weight_gradient[(tiles,)](total_eoi, g_ro, x_ri, ends_e, o, i, adds, **TILE)
    return total_eoi


@triton.jit
def _add_weight_gradient(
    total, g, x, ends, o_size, i_size, ADDS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    tiles_i = tl.cdiv(i_size, BLOCK_I)
    tiles = tl.cdiv(o_size, BLOCK_O) * tiles_i
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    o = tile // tiles_i * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tile % tiles_i * BLOCK_I + tl.arange(0, BLOCK_I)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    row = (start + tl.arange(0, BLOCK_R))[:, None].to(tl.int64)
    g_place, x_place = g + row * o_size + o[None, :], x + row * i_size + i[None, :]
    total_oi = tl.zeros([BLOCK_O, BLOCK_I], dtype=tl.float32)
    for first in range(start, end, BLOCK_R):
        inside = (first + tl.arange(0, BLOCK_R) < end)[:, None]
        g_ro = tl.load(g_place, mask=inside & (o[None, :] < o_size), other=0.0)
        x_ri = tl.load(x_place, mask=inside & (i[None, :] < i_size), other=0.0)
        total_oi = tl.dot(tl.trans(g_ro), x_ri, total_oi)
        g_place += BLOCK_R * o_size
        x_place += BLOCK_R * i_size
    place = total + (expert.to(tl.int64) * o_size + o[:, None]) * i_size + i[None, :]
    within = (o[:, None] < o_size) & (i[None, :] < i_size)
    if ADDS:
        total_oi += tl.load(place, mask=within)
    tl.store(place, total_oi, mask=within)


def zero_empty_(gradient_eoi: Tensor, ends_e: Tensor) -> Tensor:
    """Set the slices of the experts without rows to zero, in place; the gradient must be contiguous."""
    _zero_empty[(len(ends_e), VISITS)](gradient_eoi, ends_e, gradient_eoi[0].numel(), VISITS, BLOCK)
    return gradient_eoi


@triton.jit
def _zero_empty(gradient, ends, size, VISITS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) == start:
        first = tl.program_id(1).to(tl.int64) * BLOCK
        for offset in range(first, size, VISITS * BLOCK):
            place = offset + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], dtype=gradient.dtype.element_ty)
            tl.store(gradient + expert.to(tl.int64) * size + place, zeros, mask=place < size)
