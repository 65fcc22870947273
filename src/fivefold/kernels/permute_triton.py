"""Moving rows as two Triton kernels, for CUDA; imported when the first CUDA tensor comes.

Each byte is moved once: the copies of a token are added up in registers, in a fixed order, without atomic additions.
"""

# n tokens  k places of a token  r rows that are taken  d width

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
"""Elements of the output that a program makes."""


def gather_rows(x_nd: Tensor, index_r: Tensor) -> Tensor:
    """The rows x[index], of any format: (r, d), or (r,) of numbers (n,)."""
    x_nd, index_r = x_nd.contiguous(), index_r.contiguous()
    out = x_nd.new_empty(len(index_r), *x_nd.shape[1:])
    if out.numel():
        d = x_nd.shape[1:].numel()
        rows, columns = tile(d)
        grid = (triton.cdiv(len(index_r), rows), triton.cdiv(d, columns))
        _gather_rows[grid](x_nd, index_r, out, len(index_r), d, rows, columns)
    return out


def sum_rows(rows_rd: Tensor, places_nk: Tensor) -> Tensor:
    """out[n] = the sum over k of rows[places[n, k]], added up in fp32: (n, d), or (n,) of numbers (r,)."""
    rows_rd, places_nk = rows_rd.contiguous(), places_nk.contiguous()
    n, k = places_nk.shape
    out = rows_rd.new_empty(n, *rows_rd.shape[1:])
    if not len(rows_rd):
        return out.zero_()
    if out.numel():
        d = rows_rd.shape[1:].numel()
        rows, columns = tile(d)
        grid = (triton.cdiv(n, rows), triton.cdiv(d, columns))
        _sum_rows[grid](rows_rd, places_nk, out, n, d, k, rows, columns)
    return out


def tile(d: int) -> tuple[int, int]:
    """Rows and columns of the output that a program makes: columns that divide d, where they are not too few."""
    columns = d & -d if d & -d >= 128 else triton.next_power_of_2(d)
    columns = min(columns, TILE)
    return TILE // columns, columns


@triton.jit
def _gather_rows(x, index, out, r, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < r)[:, None] & (column < d)[None, :]
    source = tl.load(index + row, mask=row < r, other=0).to(tl.int64)
    value = tl.load(x + source[:, None] * d + column[None, :], mask=inside)
    tl.store(out + row[:, None] * d + column[None, :], value, mask=inside)


@triton.jit
def _sum_rows(rows, places, out, n, d, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for k in tl.static_range(K):
        place = tl.load(places + row * K + k, mask=row < n, other=-1).to(tl.int64)
        there = (place >= 0)[:, None] & (column < d)[None, :]
        total += tl.load(rows + place[:, None] * d + column[None, :], mask=there, other=0.0).to(tl.float32)
    inside = (row < n)[:, None] & (column < d)[None, :]
    tl.store(out + row[:, None] * d + column[None, :], total.to(out.dtype.element_ty), mask=inside)
