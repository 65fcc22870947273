"""Ulysses: ranks of cp swap positions for heads, attend over whole sequences with some heads each, and swap back.

What is split: the positions outside attention, the heads inside; query heads and key/value heads divide by cp. Which
collective: one all-to-all of q, k and v together before attention, one of its output after it; backward the same two.
Source: Jacobs et al. 2023 (DeepSpeed Ulysses).
"""

# b sequences  s positions of this rank  S all positions  h query heads  g key/value heads  e head size  c ranks of cp

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.axis import Axis


def ulysses_attention(
    q_bshe: Tensor,
    k_bsge: Tensor,
    v_bsge: Tensor,
    axis: Axis,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """-> (b, s, h, e). `attend` gets whole sequences (b, S, h / c, e) and the heads of this rank, in order."""
    by_rank = [x.unflatten(2, (axis.size, -1)) for x in (q_bshe, k_bsge, v_bsge)]
    sent_cbsie = torch.cat(by_rank, dim=3).movedim(2, 0)
    heads_bSie = _Exchange.apply(sent_cbsie, axis).movedim(0, 1).flatten(1, 2)
    out_bShe = attend(*heads_bSie.split([x.shape[3] for x in by_rank], dim=2))
    sent_cbshe = out_bShe.unflatten(1, (axis.size, -1)).movedim(1, 0)
    return _Exchange.apply(sent_cbshe, axis).movedim(0, 2).flatten(2, 3)


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
