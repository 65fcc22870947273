"""Ring attention: keys and values travel once around the ranks of cp, while each rank attends to those it has.

What is split: the positions; rank r holds chunks r and 2 cp - 1 - r of 2 cp, so that of what comes from another rank
half is seen, whichever it is: all queries see the first half of an earlier rank's keys, the second half of the queries
all of a later rank's. Which collective: a send to the next rank and a receive from the one before, cp - 1 times
forward; backward they travel again, and the gradients of keys and values with them, one hop more, home.
Sources: Liu et al. 2023 (Ring Attention); Brandon et al. 2023 (Striped Attention: why a contiguous cut waits).
"""

# b sequences  s positions of this rank  h query heads  g key/value heads  e head size  2 keys and values

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.kernels.attention import Causal, Rows, is_plain, mask_between
from fivefold.kernels.partial_attention import ALL, Gradients, Piece, Running, Whole
from fivefold.parallel.axis import Axis


def ring_pieces(axis: Axis, like: Tensor, rows: list[Rows], slopes_h: Tensor | None) -> list[Piece]:
    """What this rank attends to at each hop; rows[r] are those of rank r.

    Documents and ALiBi take masks of all local queries and all keys at hand: on a GPU blocks that are not seen cost
    nothing, and one shape means one compiled kernel.
    """
    mine = rows[axis.rank]
    senders = [(axis.rank - hop) % axis.size for hop in range(axis.size)]
    if not is_plain(like, mine.documents_bs, slopes_h):
        return [Piece(ALL, ALL, mask_between(like, mine, rows[sender], slopes_h)) for sender in senders]
    half = len(mine.positions_s) // 2
    earlier, later = Piece(ALL, slice(half), Whole()), Piece(slice(half, None), ALL, Whole())
    return [Piece(ALL, ALL, Causal()), *(earlier if sender < axis.rank else later for sender in senders[1:])]


def ring_attention(q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor, axis: Axis, hops: list[Piece]) -> Tensor:
    """Attention over the keys of all ranks -> (b, s, h, e)."""
    return _Ring.apply(q_bshe, k_bsge, v_bsge, axis, hops)


class _Ring(torch.autograd.Function):
    """Keeps this rank's q, k, v, output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor, axis: Axis, hops: list[Piece]) -> Tensor:
        q_bshe = q_bshe.contiguous()
        kv_2bsge = torch.stack((k_bsge, v_bsge))
        running = Running(q_bshe.transpose(1, 2))
        here_2bsge = kv_2bsge
        for hop, piece in enumerate(hops):
            arriving = _send_on(here_2bsge, axis) if hop + 1 < axis.size else None
            running.add([piece], q_bshe.transpose(1, 2), *here_2bsge.transpose(2, 3))
            if arriving is not None:
                here_2bsge = arriving.wait()
        out_bshe = running.out_bhne.transpose(1, 2).to(q_bshe.dtype)
        ctx.save_for_backward(q_bshe, kv_2bsge, out_bshe, running.lse_bhn)
        ctx.axis, ctx.hops = axis, hops
        return out_bshe

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_bshe: Tensor) -> tuple[Tensor | None, ...]:
        q_bshe, kv_2bsge, out_bshe, lse_bhs = ctx.saved_tensors
        axis: Axis = ctx.axis
        dout_bhse, q_bhse, out_bhse = (x.transpose(1, 2) for x in (dout_bshe, q_bshe, out_bshe))
        gradients = Gradients(dout_bhse, q_bhse, out_bhse, lse_bhs)
        here_2bsge, coming_home = kv_2bsge, None
        for hop, piece in enumerate(ctx.hops):
            arriving = _send_on(here_2bsge, axis) if hop + 1 < axis.size else None
            dkv_2bsge = torch.zeros_like(here_2bsge, dtype=gradients.dq_bhne.dtype)
            gradients.add([piece], *here_2bsge.transpose(2, 3), *dkv_2bsge.transpose(2, 3))
            if coming_home is not None:  # what the ranks before have added for the same keys
                dkv_2bsge += coming_home.wait()
            coming_home = _send_on(dkv_2bsge, axis)
            if arriving is not None:
                here_2bsge = arriving.wait()
        assert coming_home is not None
        dk_bsge, dv_bsge = coming_home.wait().to(kv_2bsge.dtype)
        return gradients.dq_bhne.transpose(1, 2).to(q_bshe.dtype), dk_bsge, dv_bsge, None, None


@dataclass(frozen=True)
class _Travelling:
    """A tensor on its way from the rank before, while this rank's goes to the next."""

    result: Tensor
    works: list[dist.Work]
    source: Tensor
    """Kept until the transfer has ended."""

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.result


def _send_on(x: Tensor, axis: Axis) -> _Travelling:
    result = torch.empty_like(x)
    following, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    sends = dist.P2POp(dist.isend, x, group=axis.group, group_peer=following)
    receives = dist.P2POp(dist.irecv, result, group=axis.group, group_peer=before)
    return _Travelling(result, dist.batch_isend_irecv([sends, receives]), x)
