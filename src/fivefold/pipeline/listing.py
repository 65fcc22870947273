"""List scheduling: ranks fill their time as it passes, each with the most urgent action that is ready, as habits say.

The gradients that other ranks wait for come first, then forwards as far as memory allows, and weight gradients where a
rank would be idle. `greedy.py` tries habits and keeps the best. Imports no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise

from fivefold.pipeline.schedule import KINDS, Action, Kind
from fivefold.pipeline.times import Times


@dataclass(frozen=True)
class Habits:
    """How a rank chooses. It sees what is ready, and what others are at and will have sent by a known time."""

    await_first: float = 0.0
    """Until its first I it leaves an F for an I that comes within this share of the F's time."""
    await_next: float = 0.0
    """It leaves a W for an F or I that comes within this share of the W's time."""
    await_last: float = 0.0
    """The same once it has no F left."""
    taper: float = 0.0
    """What share of the limit forwards in flight leave unused on the last rank; on those before it less, evenly."""
    in_turn: bool = False
    """After an I it prefers an F to another I."""
    shared: bool = False
    """Each of its stages has a share of the limit, in proportion to how long its activations are held."""


@dataclass(frozen=True)
class Problem:
    """What is to be scheduled."""

    placement: tuple[int, ...]
    microbatches: int
    times: Times
    limit: float
    """Activations of one whole rank of one microbatch that a rank may hold."""
    weight: float
    """What an activation is from I to the end of W, as a share of what it is from F to I."""

    @property
    def ranks(self) -> int:
        """How many there are."""
        return max(self.placement) + 1

    @property
    def chunks(self) -> int:
        """Stages a rank."""
        return len(self.placement) // self.ranks

    @cached_property
    def actions(self) -> dict[Kind, list[list[Action]]]:
        """By kind, stage and microbatch; made once, since they are listed again with all habits."""
        stages, microbatches = range(len(self.placement)), range(self.microbatches)
        return {kind: [[Action(kind, s, m) for m in microbatches] for s in stages] for kind in KINDS if kind != "B"}


def orders(problem: Problem, habits: Habits) -> tuple[float, tuple[tuple[Action, ...], ...]]:
    """Each rank's actions, and the time from first start to last end of the rank for which it is longest.

    Needs a limit of at least max(1, weight), and finds an order under any such limit.
    """
    return _Listing(problem, habits).run()


class _Rank:
    """What a rank has done and holds. Memory is counted in activations of one chunk."""

    def __init__(self, number: int, problem: Problem, habits: Habits) -> None:
        self.number = number
        self.stages = [stage for stage, holder in enumerate(problem.placement) if holder == number]
        self.deepest_first = self.stages[::-1]
        most = len(self.stages) * problem.microbatches
        # Where W's share is above 1, an F reserves it, so that an I never has to wait for memory.
        self.kept = min(1.0, problem.weight)
        self.limit = min(most, problem.limit * problem.chunks / max(1.0, problem.weight) + 1e-9)
        tapered = habits.taper * number / max(1, problem.ranks - 1)
        self.flight = max(len(self.stages), self.limit - tapered * (self.limit - 1))
        """The most forwards in flight."""
        self.held = 0.0
        self.flying = 0
        self.waiting: deque[Action] = deque()
        """The W of every I that was run."""
        self.order: list[Action] = []
        self.began: float | None = None
        self.free = 0.0
        self.last: Kind = "F"
        """The last action that was no W."""


class _Listing:
    def __init__(self, problem: Problem, habits: Habits) -> None:
        self.problem = problem
        self.habits = habits
        self.actions = problem.actions
        self.times = times = problem.times
        self.ranks = [_Rank(number, problem, habits) for number in range(problem.ranks)]
        placement, stages = problem.placement, len(problem.placement)
        hop = times.latency + times.transfer
        self.hops = [0.0 if left == right else hop for left, right in pairwise(placement)]
        """What it takes from each stage to the next, and back."""
        self.inputs: list[list[float]] = [[] for _ in range(stages)]
        """When each microbatch's input comes to a stage, as far as it is known."""
        self.inputs[0] = [0.0] * problem.microbatches
        self.gradients: list[list[float]] = [[] for _ in range(stages)]
        """When each microbatch's gradient does."""
        self.quotas = self._quotas() if habits.shared else [float("inf")] * stages
        """The most forwards in flight of each stage."""
        self.forwards = [0] * stages
        self.backwards = [0] * stages
        self.events = [(0.0, number) for number in range(problem.ranks)]
        """When which rank may have something to choose."""
        heapify(self.events)

    def _quotas(self) -> list[float]:
        """Each stage's share of its rank's limit, in proportion to the time from its F to its I if nothing waits."""
        trips = [0.0] * len(self.inputs)
        on = 0.0
        for stage in reversed(range(len(trips))):
            on += self.times.forward[stage] + self.times.input[stage]
            trips[stage] = on
            on += 2 * self.hops[stage - 1] if stage else 0.0
        totals = [sum(trips[stage] for stage in rank.stages) for rank in self.ranks]
        return [
            max(1.0, self.ranks[number].limit * (trip / totals[number] if totals[number] else 1 / self.problem.chunks))
            for trip, number in zip(trips, self.problem.placement, strict=True)
        ]

    def run(self) -> tuple[float, tuple[tuple[Action, ...], ...]]:
        while self.events:
            now, number = heappop(self.events)
            rank = self.ranks[number]
            if now >= rank.free and (action := self._choice(rank, now)) is not None:
                self._start(rank, action, now)
        longest = max(rank.free - rank.began for rank in self.ranks if rank.began is not None)
        return longest, tuple(tuple(rank.order) for rank in self.ranks)

    def _choice(self, rank: _Rank, now: float) -> Action | None:
        """What `rank` does now; None if it waits for what comes next."""
        gradient, next_gradient = self._ready(rank.deepest_first, self.gradients, self.backwards, now)
        allowed = [stage for stage in rank.deepest_first if self._has_room(rank, stage)]
        forward, next_input = self._ready(allowed, self.inputs, self.forwards, now)
        if gradient is not None and not (self.habits.in_turn and rank.last == "I" and forward is not None):
            return self.actions["I"][gradient][self.backwards[gradient]]
        if forward is not None:
            patience = self.habits.await_first * self.times.forward[forward]
            if next_gradient - now < patience and not self.backwards[rank.stages[-1]]:
                return None
            return self.actions["F"][forward][self.forwards[forward]]
        if not rank.waiting:
            return None
        ended = self.forwards[rank.stages[-1]] == self.problem.microbatches
        share = self.habits.await_last if ended else self.habits.await_next
        patience = share * self.times.weight[rank.waiting[0].stage]
        return None if min(next_gradient, next_input) - now < patience else rank.waiting[0]

    @staticmethod
    def _ready(
        stages: Sequence[int], arrivals: list[list[float]], done: list[int], now: float
    ) -> tuple[int | None, float]:
        """The first of `stages` whose next microbatch is there, and when the next one comes, as far as it is known."""
        ready, soonest = None, float("inf")
        for stage in stages:
            known = arrivals[stage]
            if done[stage] < len(known):
                arrival = known[done[stage]]
                if arrival > now:
                    soonest = min(soonest, arrival)
                elif ready is None:
                    ready = stage
        return ready, soonest

    def _has_room(self, rank: _Rank, stage: int) -> bool:
        """Whether the rank can hold one more forward of `stage`, and still bring every older microbatch to its end.

        All forwards of the oldest microbatch that lacks one here must find room beside those of younger ones, which
        cannot be returned before it; older ones will be returned. So no limit leads into a dead end.
        """
        if rank.held + 1 > rank.limit or rank.flying + 1 > rank.flight:
            return False
        if self.forwards[stage] - self.backwards[stage] + 1 > self.quotas[stage]:
            return False
        oldest = self.forwards[rank.stages[-1]]
        if self.forwards[stage] == oldest:
            return True
        younger = sum(max(0, self.forwards[one] - oldest - 1) for one in rank.stages)
        return younger + 1 + len(rank.stages) <= rank.flight

    def _start(self, rank: _Rank, action: Action, now: float) -> None:
        kind, stage, microbatch = action
        end = now + self.times.of(action)
        if kind == "F":
            self.forwards[stage] += 1
            rank.held += 1
            rank.flying += 1
            if stage < len(self.hops):
                self._send(self.inputs, stage + 1, end + self.hops[stage])
            else:
                self._send(self.gradients, stage, end)
        elif kind == "I":
            self.backwards[stage] += 1
            rank.held -= 1 - rank.kept
            rank.flying -= 1
            rank.waiting.append(self.actions["W"][stage][microbatch])
            if stage:
                self._send(self.gradients, stage - 1, end + self.hops[stage - 1])
        else:
            rank.held -= rank.kept
            rank.waiting.popleft()
        if kind != "W":
            rank.last = kind
        if rank.began is None:
            rank.began = now
        rank.free = end
        rank.order.append(action)
        heappush(self.events, (end, rank.number))

    def _send(self, arrivals: list[list[float]], stage: int, when: float) -> None:
        arrivals[stage].append(when)
        heappush(self.events, (when, self.problem.placement[stage]))
