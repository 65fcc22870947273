"""The last touch to a schedule: weight gradients that stand in the way of its critical path are moved behind.

The critical path leads back from the last end of the longest rank, from each action to what it waited for: the output
that it needs, or the action before it on its rank. If the latter is a W, for which nobody waits, the two may be better
the other way round. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from fivefold.pipeline.flow import gives, needs
from fivefold.pipeline.memory import levels
from fivefold.pipeline.schedule import Schedule
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.timeline import Timeline
from fivefold.pipeline.times import Sizes, Times

TRIED = 8
"""Of the weight gradients in the way, how many are tried at each step, those that hold up the most first."""


class Polished(NamedTuple):
    """A schedule and its timeline."""

    schedule: Schedule
    timeline: Timeline


class _Delay(NamedTuple):
    """A W to exchange with the action after it, and by how much that could bring the latter forward."""

    gain: float
    rank: int
    place: int


def polish(schedule: Schedule, times: Times, sizes: Sizes, limit: float, steps: int) -> Polished:
    """`schedule`, which has no pairs, after at most `steps` exchanges that keep `limit` and make nothing longer.

    What makes nothing shorter by itself is kept too, since there may be several paths of the same length. A W only
    ever moves back, so this ends.
    """
    best = Polished(schedule, simulate(schedule, times, sizes))
    for _ in range(steps):
        delays = sorted(_delays(*best, times), reverse=True)[:TRIED]
        orders = ((delay.rank, _delayed(best.schedule, delay)) for delay in delays)
        allowed = (other for rank, other in orders if _peak(other, rank, sizes) <= limit + 1e-9)
        tried = (Polished(other, simulate(other, times, sizes)) for other in allowed)
        better = next((one for one in tried if one.timeline.cost <= best.timeline.cost), None)
        if better is None:
            break
        best = better
    return best


def _peak(schedule: Schedule, rank: int, sizes: Sizes) -> float:
    return max(level.during for level in levels(schedule.actions[rank], sizes))


def _delays(schedule: Schedule, timeline: Timeline, times: Times) -> Iterator[_Delay]:
    """Each W for which an action on the critical path waited, though it did not need it."""
    makers = {
        gives(action): (rank, index)
        for rank, actions in enumerate(schedule.actions)
        for index, action in enumerate(actions)
    }
    hop = times.latency + times.transfer
    rank = timeline.lengths.index(timeline.cost)
    index = len(timeline.spans[rank]) - 1
    while index >= 0:
        action, start, _ = timeline.spans[rank][index]
        needed = needs(action, schedule.stages)
        arrival = 0.0
        if needed is not None:
            maker, made = makers[needed]
            arrival = timeline.spans[maker][made].end + (hop if maker != rank else 0.0)
            if arrival >= start - 1e-9 * timeline.cost:
                rank, index = maker, made
                continue
        if index and action.kind != "W":
            before = timeline.spans[rank][index - 1]
            if before.action.kind == "W":
                yield _Delay(min(start - arrival, before.end - before.start), rank, index - 1)
        index -= 1


def _delayed(schedule: Schedule, delay: _Delay) -> Schedule:
    order = list(schedule.ranks[delay.rank])
    order[delay.place : delay.place + 2] = reversed(order[delay.place : delay.place + 2])
    ranks = (*schedule.ranks[: delay.rank], tuple(order), *schedule.ranks[delay.rank + 1 :])
    return replace(schedule, ranks=ranks)
