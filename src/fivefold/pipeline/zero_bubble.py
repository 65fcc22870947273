"""ZB-H1 and ZB-H2: 1F1B whose weight gradients wait, and fill what would be idle time (Qi et al. 2023, 2401.10241).

Backward is split: I, which the rank before waits for, runs where 1F1B has B; W, which nobody waits for, comes later.
Imports no torch.
"""

from __future__ import annotations

from fivefold.pipeline.schedule import Action, Kind, Schedule, looped


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """As many forwards ahead as 1F1B, rank r's W r microbatches behind its I; the memory is that of 1F1B's first rank.

    Bubble (p-1)/(3m+p-1) where F, I and W take the same: a third of that of 1F1B. At most p activations on any rank.
    """
    orders = tuple(_order(rank, microbatches, ahead=ranks - 1 - rank, behind=rank) for rank in range(ranks))
    return Schedule("zb-h1", orders, looped(ranks, 1), microbatches)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Twice the forwards ahead and twice the W behind: no bubble where F, I and W take the same and m >= 2p - 1.

    At most 2p - 1 activations on any rank.
    """
    orders = tuple(_order(rank, microbatches, ahead=2 * (ranks - 1 - rank), behind=2 * rank) for rank in range(ranks))
    return Schedule("zb-h2", orders, looped(ranks, 1), microbatches)


def _order(rank: int, microbatches: int, ahead: int, behind: int) -> tuple[Action, ...]:
    """`ahead` forwards, then F, I and W in turn as long as there are any, each W `behind` microbatches after its I."""
    order = [Action("F", rank, microbatch) for microbatch in range(min(ahead, microbatches))]
    for turn in range(microbatches + behind):
        turns: tuple[tuple[Kind, int], ...] = (("F", turn + ahead), ("I", turn), ("W", turn - behind))
        order += [Action(kind, rank, microbatch) for kind, microbatch in turns if 0 <= microbatch < microbatches]
    return tuple(order)
