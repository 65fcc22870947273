"""When each action of a schedule would run, given what actions and transfers take: the executor, without the work.

A rank runs its actions in its order, each as soon as what it needs is there. Every ordered pair of ranks has its own
channel, which carries one message after the other in the order in which the sender's actions end; sending never makes
a rank wait, unless transfers do not overlap with computation. Imports no torch.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from fivefold.pipeline.check import require_sound
from fivefold.pipeline.flow import gives, needs, receiver
from fivefold.pipeline.schedule import KINDS, Action, Schedule
from fivefold.pipeline.timeline import Span, Timeline, Transfer
from fivefold.pipeline.times import Sizes, Times


class _Step(NamedTuple):
    """All there is to know of one stage's actions of one kind, looked up once for all microbatches.

    Outputs are numbered: that of microbatch m has the number `gives` + m.
    """

    takes: float
    needs: int
    """The number, for microbatch 0, of the output that it waits for; -1 if it waits for none."""
    receives: bool
    """Whether that comes from another rank."""
    gives: int
    """The number of its own output for microbatch 0; -1 if it has none."""
    target: int
    """The rank to which its output travels; -1 if it stays."""


def simulate(schedule: Schedule, times: Times, sizes: Sizes | None = None) -> Timeline:
    """The timeline of a sound schedule; `sizes` are `Sizes.uniform` unless given.

    Without overlap a transfer keeps the sender busy right after the action, and the receiver right before the one that
    needs it. Raises UserError, with the circle, if the ranks would wait for each other forever.
    """
    run = _ended(schedule, times)
    kept = Sizes.uniform(schedule.placement) if sizes is None else sizes
    return Timeline(run.spans(), run.transfers(), kept)


def makespan(schedule: Schedule, times: Times) -> float:
    """That of the timeline, which is not made for it. Raises UserError as `simulate`."""
    return max((ends[-1] for ends in _ended(schedule, times).ends if ends), default=0.0)


def _ended(schedule: Schedule, times: Times) -> _Run:
    """The simulation, to its end."""
    run = _Run(schedule, times)
    ready = list(range(len(schedule.ranks)))
    while ready:
        ready += run.advance(ready.pop())
    if run.waiting:
        require_sound(schedule)
    return run


class _Run:
    """A simulation under way: how far each rank has come, and when the outputs were where they are needed."""

    def __init__(self, schedule: Schedule, times: Times) -> None:
        self.schedule = schedule
        self.times = times
        self.steps = _steps(schedule, times)
        self.there: list[float | None] = [None] * (2 * schedule.stages * schedule.microbatches)
        self.starts: list[list[float]] = [[] for _ in schedule.ranks]
        self.ends: list[list[float]] = [[] for _ in schedule.ranks]
        self.free = [0.0] * len(schedule.ranks)
        """When each rank has ended what it did last."""
        self.carried: list[dict[int, float]] = [{} for _ in schedule.ranks]
        """By sender and receiver, when the channel has ended its last message."""
        self.sent: list[list[tuple[int, Action, float]]] = [[] for _ in schedule.ranks]
        """By sender: the receiver, the action whose output it is, and when it left."""
        self.waiting: dict[int, int] = {}
        """The rank that waits for an output."""

    def advance(self, rank: int) -> list[int]:
        """Run `rank` until it waits for an output that is not made yet; returns the ranks that waited for its own.

        The order in which ranks advance changes no time: a channel has one sender, whose order it keeps.
        """
        steps, there, waiting = self.steps, self.there, self.waiting
        starts, ends, sent, carried = self.starts[rank], self.ends[rank], self.sent[rank], self.carried[rank]
        transfer, overlap = self.times.transfer, self.times.overlap
        travel = self.times.latency + transfer
        free = self.free[rank]
        woken = []
        for action in islice(self.schedule.actions[rank], len(starts), None):
            kind, stage, microbatch = action
            takes, needs, receives, gives, target = steps[kind][stage]
            start = free
            if needs >= 0:
                arrival = there[needs + microbatch]
                if arrival is None:
                    waiting[needs + microbatch] = rank
                    break
                if receives and not overlap:
                    start += travel
                if arrival > start:
                    start = arrival
            free = end = start + takes
            starts.append(start)
            ends.append(end)
            if gives >= 0:
                if target >= 0:
                    leaves = max(end, carried.get(target, 0.0))
                    carried[target] = leaves + transfer
                    sent.append((target, action, leaves))
                    end = leaves + travel
                    if not overlap:
                        free = end
                there[gives + microbatch] = end
                if gives + microbatch in waiting:
                    woken.append(waiting.pop(gives + microbatch))
        self.free[rank] = free
        return woken

    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """By rank, what has run."""
        ranks = zip(self.schedule.actions, self.starts, self.ends, strict=True)
        return tuple(tuple(map(Span._make, zip(*rank, strict=True))) for rank in ranks)

    def transfers(self) -> tuple[Transfer, ...]:
        """What has travelled, by sender and in the order in which it left."""
        travel = self.times.latency + self.times.transfer
        return tuple(
            Transfer(rank, target, action, leaves, leaves + travel)
            for rank, sent in enumerate(self.sent)
            for target, action, leaves in sent
        )


def _steps(schedule: Schedule, times: Times) -> dict[str, list[_Step]]:
    """By kind and stage."""
    return {
        kind: [_step(Action(kind, stage, 0), schedule, times) for stage in range(schedule.stages)] for kind in KINDS
    }


def _step(action: Action, schedule: Schedule, times: Times) -> _Step:
    placement, stages = schedule.placement, schedule.stages
    rank = placement[action.stage]
    needed = None if action.kind == "W" else needs(action, stages)
    target = receiver(action, stages)

    def number(output: Action | None) -> int:
        if output is None:
            return -1
        return (output.stage + (stages if output.kind == "B" else 0)) * schedule.microbatches

    return _Step(
        takes=times.of(action),
        needs=number(needed),
        receives=needed is not None and placement[needed.stage] != rank,
        gives=-1 if action.kind == "W" else number(gives(action)),
        target=-1 if target is None or placement[target] == rank else placement[target],
    )
