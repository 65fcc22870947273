"""Rows moved to where they are computed and back: tokens to their experts, and the experts' outputs to their tokens.

A row may be taken several times, once for each expert that it goes to; on the way back its copies are added up. Each
move is the other's gradient, so that backward needs the places alone and no rows.
"""

# n tokens  k places of a token  r rows that are taken  d width

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def spread(x_nd: Tensor, index_r: Tensor, places_nk: Tensor) -> Tensor:
    """The rows x[index], (r, d); `places` says of each row of x where its copies lie, -1 for one that was not taken."""
    return _Spread.apply(x_nd, index_r, places_nk)


def collect(rows_rd: Tensor, index_r: Tensor, places_nk: Tensor) -> Tensor:
    """For each token the sum of the rows at its places, (n, d); `index` says of each row whose it is."""
    return _Collect.apply(rows_rd, index_r, places_nk)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_nd: Tensor, index_r: Tensor, places_nk: Tensor) -> Tensor:
        ctx.save_for_backward(places_nk)
        return gather_rows(x_nd, index_r)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_rows_rd: Tensor):
        (places_nk,) = ctx.saved_tensors
        return sum_rows(d_rows_rd, places_nk), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_rd: Tensor, index_r: Tensor, places_nk: Tensor) -> Tensor:
        ctx.save_for_backward(index_r)
        return sum_rows(rows_rd, places_nk)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out_nd: Tensor):
        (index_r,) = ctx.saved_tensors
        return gather_rows(d_out_nd, index_r), None, None


def gather_rows(x_nd: Tensor, index_r: Tensor) -> Tensor:
    """The rows x[index], (r, d), or (r,) of numbers (n,). No gradient."""
    if x_nd.is_cuda:
        from fivefold.kernels import permute_triton

        return permute_triton.gather_rows(x_nd.detach(), index_r)
    return x_nd.detach().index_select(0, index_r)


def sum_rows(rows_rd: Tensor, places_nk: Tensor) -> Tensor:
    """out[n] = the sum over k of rows[places[n, k]], (n, d), or (n,) of numbers (r,). No gradient.

    Added up in the order of k in at least fp32, and rounded once to the format of the rows. A place of -1 adds nothing.
    """
    if rows_rd.is_cuda and rows_rd.dtype != torch.float64:
        from fivefold.kernels import permute_triton

        return permute_triton.sum_rows(rows_rd.detach(), places_nk)
    return reference(rows_rd.detach(), places_nk)


def reference(rows_rd: Tensor, places_nk: Tensor) -> Tensor:
    """As `sum_rows`."""
    wide = torch.promote_types(rows_rd.dtype, torch.float32)
    total_nd = rows_rd.new_zeros(len(places_nk), *rows_rd.shape[1:], dtype=wide)
    if len(rows_rd):
        for places_n in places_nk.unbind(1):
            dropped = (places_n < 0).view(-1, *[1] * (rows_rd.ndim - 1))
            total_nd += rows_rd.index_select(0, places_n.clamp(min=0)).to(wide).masked_fill_(dropped, 0.0)
    return total_nd.to(rows_rd.dtype)
