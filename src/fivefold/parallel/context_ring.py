"""Ring attention: keys and values travel once around the ranks of cp, while each rank attends to those it has.

What is split: the positions; rank r holds chunks r and 2 cp - 1 - r of 2 cp, so that of what comes from another rank
half is seen, whichever it is: all queries see the first half of an earlier rank's keys, the second half of the queries
all of a later rank's. Which collective: a send to the next rank and a receive from the one before, cp - 1 times
forward; backward they travel again, and what each rank finds for the gradients of keys and values goes straight home to
their owner, who adds up in at least fp32.
Sources: Liu et al. 2023 (Ring Attention); Brandon et al. 2023 (Striped Attention: why a contiguous cut waits).
"""

# b sequences  s positions of this rank  h query heads  g key/value heads  e head size  2 keys and values

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.kernels.attention import Causal, Rows, is_plain, mask_between
from fivefold.kernels.partial_attention import ALL, Gradients, Piece, Running, Whole
from fivefold.parallel.axis import Axis


@dataclass(frozen=True)
class Hop:
    """What is attended to after so many steps around the ring."""

    piece: Piece
    """Of the keys of the rank so many before."""
    attended: slice
    """Which of this rank's keys the rank so many further on attends to, whose gradients then come home."""


def ring_hops(axis: Axis, like: Tensor, rows: list[Rows], slopes_h: Tensor | None) -> list[Hop]:
    """The hops of this rank; rows[r] are those of rank r.

    Documents and ALiBi take masks of all local queries and all keys at hand: on a GPU blocks that are not seen cost
    nothing, and one shape means one compiled kernel.
    """
    mine = rows[axis.rank]
    senders = [(axis.rank - hop) % axis.size for hop in range(axis.size)]
    if not is_plain(like, mine.documents_bs, slopes_h):
        masks = [mask_between(like, mine, rows[sender], slopes_h) for sender in senders]
        return [Hop(Piece(ALL, ALL, mask), attended=ALL) for mask in masks]
    half = len(mine.positions_s) // 2
    earlier, later = Piece(ALL, slice(half), Whole()), Piece(slice(half, None), ALL, Whole())
    hops = [Hop(Piece(ALL, ALL, Causal()), attended=ALL)]
    for hop, sender in enumerate(senders[1:], start=1):
        receiver = (axis.rank + hop) % axis.size
        attended = earlier.keys if axis.rank < receiver else later.keys
        hops.append(Hop(earlier if sender < axis.rank else later, attended))
    return hops


def ring_attention(q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor, axis: Axis, hops: list[Hop]) -> Tensor:
    """Attention over the keys of all ranks -> (b, s, h, e)."""
    return _Ring.apply(q_bshe, k_bsge, v_bsge, axis, hops)


class _Ring(torch.autograd.Function):
    """Keeps this rank's q, k, v, output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor, axis: Axis, hops: list[Hop]) -> Tensor:
        q_bshe = q_bshe.contiguous()
        kv_2bsge = torch.stack((k_bsge, v_bsge))
        running = Running(q_bshe.transpose(1, 2), len(hops))
        here_2bsge = kv_2bsge
        for number, hop in enumerate(hops, start=1):
            arriving = axis.start_exchange(here_2bsge, hops=1) if number < axis.size else None
            running.add([hop.piece], q_bshe.transpose(1, 2), *here_2bsge.transpose(2, 3))
            if arriving is not None:
                here_2bsge = arriving.wait()
        out_bshe = running.output.transpose(1, 2).to(q_bshe.dtype)
        ctx.save_for_backward(q_bshe, kv_2bsge, out_bshe, running.lse_bhn)
        ctx.axis, ctx.hops = axis, hops
        return out_bshe

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_bshe: Tensor) -> tuple[Tensor | None, ...]:
        q_bshe, kv_2bsge, out_bshe, lse_bhs = ctx.saved_tensors
        axis: Axis = ctx.axis
        dout_bhse, q_bhse, out_bhse = (x.transpose(1, 2) for x in (dout_bshe, q_bshe, out_bshe))
        gradients = Gradients(dout_bhse, q_bhse, out_bhse, lse_bhs, len(ctx.hops))
        here_2bsge, homeward = kv_2bsge, []
        for number, hop in enumerate(ctx.hops):
            arriving = axis.start_exchange(here_2bsge, hops=1) if number + 1 < axis.size else None
            dkv_2bgme = torch.stack(gradients.of(hop.piece, *here_2bsge.transpose(2, 3)))
            if number == 0:
                wide = torch.promote_types(dkv_2bgme.dtype, torch.float32)
                own_2bgse = dkv_2bgme if axis.size == 2 else dkv_2bgme.to(wide)  # two are rounded once in any format
            else:
                home_2bgme = torch.empty_like(own_2bgse[:, :, :, hop.attended], dtype=dkv_2bgme.dtype)
                homeward.append((hop.attended, axis.start_exchange(dkv_2bgme, hops=-number, out=home_2bgme)))
            if arriving is not None:
                here_2bsge = arriving.wait()
        for attended, coming in homeward:
            own_2bgse[:, :, :, attended] += coming.wait()
        dk_bsge, dv_bsge = own_2bgse.to(kv_2bsge.dtype).transpose(2, 3)
        return gradients.of_queries.transpose(1, 2).to(q_bshe.dtype), dk_bsge, dv_bsge, None, None
