"""Context parallelism by gathering: each rank collects the keys and values of all positions, and attends for its own.

What is split: the positions, balanced as for the ring. Which collective: one all-gather of keys and values a layer,
which grouped queries make small; it is repeated in backward, where their gradients take one reduce-scatter. Source:
Dubey et al. 2024 (Llama 3), section 3.3.2.
"""

# b sequences  s positions of this rank  S all positions  h query heads  g key/value heads  e head size  2 keys, values

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.kernels.attention import Causal, Rows, is_plain, mask_between
from fivefold.kernels.partial_attention import ALL, Gradients, Piece, Running, Whole
from fivefold.parallel.axis import Axis


def gather_pieces(axis: Axis, like: Tensor, queries: Rows, keys: Rows, slopes_h: Tensor | None) -> list[Piece]:
    """What this rank's positions attend to among all: each of its two chunks sees itself and the chunks before."""
    if not is_plain(like, queries.documents_bs, slopes_h):
        return [Piece(ALL, ALL, mask_between(like, queries, keys, slopes_h))]
    chunk = len(queries.positions_s) // 2
    pieces = []
    for rows, number in ((slice(chunk), axis.rank), (slice(chunk, None), 2 * axis.size - 1 - axis.rank)):
        start = number * chunk
        pieces.append(Piece(rows, slice(start, start + chunk), Causal()))
        if start:
            pieces.append(Piece(rows, slice(start), Whole()))
    return pieces


def gather_attention(
    q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor, axis: Axis, pieces: list[Piece], held_S: Tensor
) -> Tensor:
    """Attention over the keys of all ranks -> (b, s, h, e); held_S are the positions of rank 0, of rank 1 and so on."""
    return _Gather.apply(q_bshe, k_bsge, v_bsge, axis, pieces, held_S)


class _Gather(torch.autograd.Function):
    """Keeps this rank's q, k, v, output and log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any, q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor, axis: Axis, pieces: list[Piece], held_S: Tensor
    ) -> Tensor:
        q_bshe = q_bshe.contiguous()
        kv_s2bge = torch.stack((k_bsge, v_bsge)).permute(2, 0, 1, 3, 4).contiguous()
        running = Running(q_bshe.transpose(1, 2), len(pieces))
        running.add(pieces, q_bshe.transpose(1, 2), *_heads_first(_gathered(kv_s2bge, axis, held_S)))
        out_bshe = running.output.transpose(1, 2).to(q_bshe.dtype)
        ctx.save_for_backward(q_bshe, kv_s2bge, out_bshe, running.lse_bhn)
        ctx.axis, ctx.pieces, ctx.held_S = axis, pieces, held_S
        return out_bshe

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_bshe: Tensor) -> tuple[Tensor | None, ...]:
        q_bshe, kv_s2bge, out_bshe, lse_bhs = ctx.saved_tensors
        dout_bhse, q_bhse, out_bhse = (x.transpose(1, 2) for x in (dout_bshe, q_bshe, out_bshe))
        gradients = Gradients(dout_bhse, q_bhse, out_bhse, lse_bhs, len(ctx.pieces))
        kv_S2bge = _gathered(kv_s2bge, ctx.axis, ctx.held_S)
        dkv_S2bge = torch.zeros_like(kv_S2bge, dtype=torch.promote_types(kv_S2bge.dtype, torch.float32))
        gradients.add(ctx.pieces, *_heads_first(kv_S2bge), *_heads_first(dkv_S2bge))
        dkv_s2bge = ctx.axis.reduce_scatter(dkv_S2bge[ctx.held_S]).to(kv_s2bge.dtype)
        dk_bsge, dv_bsge = dkv_s2bge.permute(1, 2, 0, 3, 4)
        return gradients.of_queries.transpose(1, 2).to(q_bshe.dtype), dk_bsge, dv_bsge, None, None, None


def _gathered(kv_s2bge: Tensor, axis: Axis, held_S: Tensor) -> Tensor:
    """All keys and values, in the order of their positions: (S, 2, b, g, e)."""
    joined = axis.gather(kv_s2bge)
    return torch.empty_like(joined).index_copy_(0, held_S, joined)


def _heads_first(kv_S2bge: Tensor) -> Tensor:
    """(2, b, g, S, e), the same memory."""
    return kv_S2bge.permute(1, 2, 3, 0, 4)
