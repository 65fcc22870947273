"""Matrix products of the experts, each of its own rows with its own weight. The rows are sorted by expert.

`ends` (E,) is where each expert's rows end, int32 and on the device: how many rows an expert has need not be known on
the host. Rows behind the last end are no expert's, and what comes out for them is undefined. Where torch has no grouped
product the experts are computed one after the other, and the host reads `ends`. These functions have no gradient;
together they are each other's.
"""

# r rows  e experts  i input width  o output width

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.linear import add_product, multiply


def grouped_multiply(x_ri: Tensor, weight_eoi: Tensor, ends_e: Tensor) -> Tensor:
    """The rows of each expert times its weight^T: (r, o)."""
    return _by_expert(x_ri, weight_eoi.detach().contiguous().mT, ends_e)


def grouped_multiply_transposed(g_ro: Tensor, weight_eoi: Tensor, ends_e: Tensor) -> Tensor:
    """The rows of each expert times its weight: (r, i), the gradient of `grouped_multiply`'s rows."""
    return _by_expert(g_ro, weight_eoi.detach().contiguous(), ends_e)


def grouped_weight_gradient(g_ro: Tensor, x_ri: Tensor, ends_e: Tensor) -> Tensor:
    """For each expert g^T x of its rows, (e, o, i) in the format of g; exactly zero for an expert without rows."""
    return add_grouped_weight_gradient(None, g_ro, x_ri, ends_e, g_ro.dtype)


def add_grouped_weight_gradient(
    total_eoi: Tensor | None, g_ro: Tensor, x_ri: Tensor, ends_e: Tensor, dtype: torch.dtype
) -> Tensor:
    """total + g^T x of each expert's rows, in place; without a total, a new one.

    The total has the format `dtype`, which may be wider than the factors': nothing is then rounded to theirs.
    """
    g_ro, x_ri = g_ro.detach().contiguous(), x_ri.detach().contiguous()
    if g_ro.is_cuda and g_ro.dtype == torch.bfloat16 and dtype == torch.float32:
        from fivefold.kernels.grouped_triton import add_weight_gradient

        return add_weight_gradient(total_eoi, g_ro, x_ri, ends_e)
    if _torch_takes(g_ro, x_ri.shape[1]):
        from fivefold.kernels.grouped_triton import zero_empty_

        product_eoi = zero_empty_(F.grouped_mm(g_ro.T, x_ri, offs=ends_e), ends_e)
        return product_eoi.to(dtype) if total_eoi is None else total_eoi.add_(product_eoi)
    if total_eoi is None:
        total_eoi = g_ro.new_zeros(len(ends_e), g_ro.shape[1], x_ri.shape[1], dtype=dtype)
    for expert, rows in _rows_of(ends_e):
        add_product(total_eoi[expert], g_ro[rows].T, x_ri[rows], dtype)
    return total_eoi


def _by_expert(rows_ra: Tensor, matrices_eab: Tensor, ends_e: Tensor) -> Tensor:
    """The rows of each expert times its matrix: (r, b)."""
    rows_ra = rows_ra.detach().contiguous()
    if _torch_takes(rows_ra, matrices_eab.shape[2]):
        return F.grouped_mm(rows_ra, matrices_eab, offs=ends_e)
    out_rb = rows_ra.new_empty(len(rows_ra), matrices_eab.shape[2])
    for expert, rows in _rows_of(ends_e):
        multiply(rows_ra[rows], matrices_eab[expert], out=out_rb[rows])
    return out_rb


def _torch_takes(rows_ra: Tensor, b: int) -> bool:
    """Whether torch has a grouped product of these rows to or with a width of b: of bf16 in units of 16 bytes."""
    bf16_on_gpu = rows_ra.is_cuda and rows_ra.dtype == torch.bfloat16
    return bf16_on_gpu and len(rows_ra) > 0 and rows_ra.shape[1] % 8 == 0 and b % 8 == 0


def _rows_of(ends_e: Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and these; waits for the device."""
    start = 0
    for expert, end in enumerate(ends_e.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end
