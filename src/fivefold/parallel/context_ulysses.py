"""Ulysses: ranks of cp swap positions for heads, attend over whole sequences with some heads each, and swap back.

What is split: the positions outside attention, the heads inside; query heads and key/value heads divide by cp. Which
collective: one all-to-all of q, k and v together before attention, one of its output after it; backward one of the
output and its gradient, one of the gradients of q, k and v. Source: Jacobs et al. 2023 (DeepSpeed Ulysses).
"""

# b sequences  s positions of this rank  S all positions  h query heads  g key/value heads  n heads of either kind
# i heads of this rank inside  e head size  c ranks of cp

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.kernels.attention import Blocks, Mask, attend
from fivefold.kernels.partial_attention import backward, forward
from fivefold.parallel.axis import Axis


def ulysses_attention(q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor, axis: Axis, mask: Mask) -> Tensor:
    """-> (b, s, h, e). `mask` is that of whole sequences and of this rank's heads."""
    if isinstance(mask, Blocks):  # flex takes no output of another's making, so it keeps its own as well
        q, k, v = _to_heads((q_bshe, k_bsge, v_bsge), axis)
        out_bSie = attend(q, k, v, mask)
        return _to_positions((out_bSie,), axis)[0]
    return _Ulysses.apply(q_bshe, k_bsge, v_bsge, axis, mask)


class _Ulysses(torch.autograd.Function):
    """Keeps q, k, v and the log-sum-exp by heads, and the output by positions, as who uses it does."""

    @staticmethod
    def forward(ctx: Any, q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor, axis: Axis, mask: Mask) -> Tensor:
        q, k, v = _to_heads((q_bshe, k_bsge, v_bsge), axis)
        out_biSe, lse_biS = forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        (out_bshe,) = _to_positions((out_biSe.transpose(1, 2).to(q.dtype),), axis)
        ctx.save_for_backward(q, k, v, lse_biS, out_bshe)
        ctx.axis, ctx.mask = axis, mask
        return out_bshe

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_bshe: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, lse_biS, out_bshe = ctx.saved_tensors
        out, dout = _to_heads((out_bshe, dout_bshe), ctx.axis)
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        gradients = backward(dout, q, k, v, out, lse_biS, ctx.mask)
        by_heads = [gradient.transpose(1, 2).to(q.dtype) for gradient in gradients]
        return *_to_positions(by_heads, ctx.axis), None, None


def _to_heads(tensors: Sequence[Tensor], axis: Axis) -> tuple[Tensor, ...]:
    """Each (b, s, n, e) -> (b, S, n / c, e), in one exchange."""
    by_rank = [x.unflatten(2, (axis.size, -1)) for x in tensors]
    sent_cbsie = torch.cat(by_rank, dim=3).movedim(2, 0)
    heads_bSie = _Exchange.apply(sent_cbsie, axis).movedim(0, 1).flatten(1, 2)
    return heads_bSie.split([x.shape[3] for x in by_rank], dim=2)


def _to_positions(tensors: Sequence[Tensor], axis: Axis) -> tuple[Tensor, ...]:
    """Each (b, S, i, e) -> (b, s, c i, e), in one exchange."""
    sent_cbsie = torch.cat(list(tensors), dim=2).unflatten(1, (axis.size, -1)).movedim(1, 0)
    parts = _Exchange.apply(sent_cbsie, axis).split([x.shape[2] for x in tensors], dim=3)
    return tuple(part.movedim(0, 2).flatten(2, 3) for part in parts)


class _Exchange(torch.autograd.Function):
    """(c, ...) -> (c, ...): part i goes to rank i, and what rank i sent comes as part i. Backward it is the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _exchange(x, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.axis), None


def _exchange(x: Tensor, axis: Axis) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=axis.group)
    return received
