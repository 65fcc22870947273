"""Which expert lies where, so that the ranks that share out a layer's experts have equally much to do.

A placement says the slot of each expert; rank r of ep holds the slots r E / ep to (r + 1) E / ep - 1. It is made from
how often each expert was chosen, and is arithmetic alone: all ranks make the same one, without asking each other.
Imports no torch. Sources: Graham 1969 (the longest job first), DeepSeek-AI 2024 (groups of experts that stay together).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

Placement = tuple[int, ...]
"""The slot of each expert: each number from 0 once."""

WORTH_MOVING = 0.03
"""By which share the fullest rank's load must fall: a step's counts of 8,192 tokens are off by about 1 % themselves."""


def in_order(experts: int) -> Placement:
    """Each expert in the slot of its own number."""
    return tuple(range(experts))


def fullest(choices: Sequence[int], placement: Placement, ranks: int) -> float:
    """The load of the rank that has most of the choices: how many times the mean of all ranks."""
    slots = len(choices) // ranks
    loads = [0] * ranks
    for chosen, slot in zip(choices, placement, strict=True):
        loads[slot // slots] += chosen
    return max(loads) * ranks / max(1, sum(loads))


def placed_anew(choices: Sequence[int], placement: Placement, ranks: int, groups: int = 1) -> Placement:
    """A placement in which the fullest of `ranks` has less to do, or the same as before if that gains little.

    The experts that are chosen most are shared out first, each to the rank with least that has a slot left. Where
    experts lie in `groups`, of which a token chooses few, a group's stay on as few ranks as they need: whole groups are
    shared out, or the experts of each among ranks of its own.
    """
    new = _shared_out(choices, ranks, groups)
    gains = fullest(choices, new, ranks) < (1 - WORTH_MOVING) * fullest(choices, placement, ranks)
    return new if gains else placement


def _shared_out(choices: Sequence[int], ranks: int, groups: int) -> Placement:
    experts = len(choices)
    members = [range(first, first + experts // groups) for first in range(0, experts, experts // groups)]
    if groups % ranks == 0:
        loads = [sum(choices[expert] for expert in group) for group in members]
        order = [expert for mine in _evenly(range(groups), loads, ranks) for group in mine for expert in members[group]]
    else:
        apart = members if ranks % groups == 0 else [range(experts)]
        each = ranks // len(apart)
        order = [expert for some in apart for mine in _evenly(some, choices, each) for expert in mine]
    slots = [0] * experts
    for slot, expert in enumerate(order):
        slots[expert] = slot
    return tuple(slots)


def _evenly(items: Iterable[int], loads: Sequence[int], ranks: int) -> list[list[int]]:
    """Equally many items for each rank, as even in the sum of their loads as the greedy rule gets them, in order."""
    heaviest_first = sorted(items, key=lambda item: (-loads[item], item))
    slots = len(heaviest_first) // ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    with_room = [(0, rank) for rank in range(ranks)]
    for item in heaviest_first:
        load, rank = heappop(with_room)
        shares[rank].append(item)
        if len(shares[rank]) < slots:
            heappush(with_room, (load + loads[item], rank))
    return [sorted(share) for share in shares]
