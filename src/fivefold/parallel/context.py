"""Context parallelism: each rank of cp holds some positions of every sequence, and attention crosses the ranks.

What is split: the sequence, with causal load balance where a rank attends for its own positions. Which collective: the
one of the method, in attention alone. `ring` passes keys and values from rank to rank while it computes
(`context_ring.py`), `gather` collects them once a layer (`context_gather.py`), `ulysses` swaps heads for positions by
all-to-all, before attention and after it (`context_ulysses.py`).
Sources: Liu et al. 2023 (Ring Attention); Jacobs et al. 2023 (DeepSpeed Ulysses); Dubey et al. 2024 (gather, and the
cut into 2 cp pieces).
"""

# b sequences  s positions of this rank  S all positions  h query heads  g key/value heads  e head size

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fivefold.kernels.attention import Rows, attend, attention_mask, slopes_like
from fivefold.parallel.axis import Axis
from fivefold.parallel.context_gather import gather_attention, gather_pieces
from fivefold.parallel.context_ring import ring_attention, ring_hops
from fivefold.parallel.context_ulysses import ulysses_attention

CPU = torch.device("cpu")
Method = Literal["ring", "gather", "ulysses"]


class ContextPlan:
    """How the layers of a forward attend. No dataclass and no tuple: FSDP looks into those and casts what it finds."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.attention = attention


def positions(seq_len: int, axis: Axis, method: Method, device: torch.device = CPU) -> Tensor:
    """(seq_len / cp,) int64, ascending: the positions of a sequence that this rank holds, on `device`.

    A token sees all before it, so later positions are more work. For `ring` and `gather` the sequence is cut into 2 cp
    chunks, of which rank r holds numbers r and 2 cp - 1 - r; for `ulysses`, where every rank attends over all
    positions, into cp. Raises ValueError if the cut does not come out even.
    """
    return _positions_of(axis.rank, seq_len, axis.size, method, device)


def whole_rows(x_bs: Tensor, axis: Axis, method: Method) -> tuple[Tensor, Tensor]:
    """From what each rank holds of the sequences, (b, s, ...), all of them, (b, S, ...), and its own positions (s,).

    A collective call without a gradient.
    """
    length = x_bs.shape[1] * axis.size
    held = [_positions_of(rank, length, axis.size, method, x_bs.device) for rank in range(axis.size)]
    x_bS = x_bs.new_empty((len(x_bs), length, *x_bs.shape[2:]))
    for positions_s, theirs_bs in zip(held, axis.gather(x_bs).chunk(axis.size), strict=True):
        x_bS[:, positions_s] = theirs_bs
    return x_bS, held[axis.rank]


def plan_attention(
    axis: Axis,
    method: Method,
    seq_len: int,
    hidden: Tensor,
    documents_bS: Tensor | None,
    slopes: Sequence[float] | None,
) -> ContextPlan:
    """Prepared once a forward; the format and the device of `hidden` choose the kernels.

    documents_bS numbers the documents of each whole row in ascending order; None if every row is one document.
    `slopes` are ALiBi's of the heads that come into `attend_across`; None without ALiBi.
    """
    if axis.size == 1 or method == "ulysses":
        if slopes is not None and axis.size > 1:
            slopes = slopes[axis.rank * len(slopes) // axis.size : (axis.rank + 1) * len(slopes) // axis.size]
        mask = attention_mask(hidden.new_empty((1, seq_len, 0)), documents_bS, slopes)
        alone = partial(attend, mask=mask)
        return ContextPlan(alone if axis.size == 1 else partial(ulysses_attention, axis=axis, mask=mask))
    slopes_h = slopes_like(hidden, slopes)
    held = [_positions_of(rank, seq_len, axis.size, method, hidden.device) for rank in range(axis.size)]
    if method == "ring":
        rows = [_rows(positions_s, documents_bS) for positions_s in held]
        return ContextPlan(partial(ring_attention, axis=axis, hops=ring_hops(axis, hidden, rows, slopes_h)))
    every = Rows(torch.arange(seq_len, device=hidden.device), documents_bS)
    pieces = gather_pieces(axis, hidden, _rows(held[axis.rank], documents_bS), every, slopes_h)
    return ContextPlan(partial(gather_attention, axis=axis, pieces=pieces, held_S=torch.cat(held)))


def attend_across(q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor, plan: ContextPlan) -> Tensor:
    """Attention of this rank's positions over those of all ranks -> (b, s, h, e); a collective call, backward too.

    Query head i uses key/value head i // (h / g).
    """
    return plan.attention(q_bshe, k_bsge, v_bsge)


def _positions_of(rank: int, seq_len: int, size: int, method: Method, device: torch.device) -> Tensor:
    numbers = [rank] if size == 1 or method == "ulysses" else [rank, 2 * size - 1 - rank]
    chunk, rest = divmod(seq_len, len(numbers) * size)
    if rest:
        raise ValueError(f"{seq_len} positions cannot be cut into {len(numbers) * size} equal chunks")
    return torch.cat([torch.arange(number * chunk, (number + 1) * chunk, device=device) for number in numbers])


def _rows(positions_s: Tensor, documents_bS: Tensor | None) -> Rows:
    return Rows(positions_s, None if documents_bS is None else documents_bS[:, positions_s])
