"""When every action of a schedule runs, and what follows from it: makespan, bubble, idle time and memory by rank.

The simulator makes it; measured times can be put into the same form. What is read off is computed when it is asked for.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from fivefold.pipeline.memory import levels
from fivefold.pipeline.schedule import Action
from fivefold.pipeline.times import Sizes


class Span(NamedTuple):
    """An action and when it ran."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """What travelled between two ranks: from when it left until it was there."""

    source: int
    target: int
    action: Action
    """The one whose output it is."""
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank ran what, in the unit of the times that it was made from; the step starts at 0."""

    spans: tuple[tuple[Span, ...], ...]
    """Each rank's actions, in its order."""
    transfers: tuple[Transfer, ...]
    """Each channel's messages are in the order in which they left."""
    sizes: Sizes
    """What the stages hold."""

    @cached_property
    def makespan(self) -> float:
        """When the last action of all ranks ends."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @cached_property
    def lengths(self) -> tuple[float, ...]:
        """Each rank's time from its first start to its last end."""
        return tuple(spans[-1].end - spans[0].start if spans else 0.0 for spans in self.spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Each rank's time in actions."""
        return tuple(sum(end - start for _, start, end in spans) for spans in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Each rank's time outside actions, from 0 to the makespan; transfers that hold it up are part of it."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def cost(self) -> float:
        """The longest rank's time from its first start to its last end."""
        return max(self.lengths)

    @property
    def bubble(self) -> float:
        """The share of the cost in which the longest rank runs no action (Qi et al. 2023, section 5.3)."""
        if not self.cost:
            return 0.0
        longest = self.lengths.index(self.cost)
        # A rank without a gap has none, whatever its sums are rounded to.
        return max(0.0, (self.cost - self.busy[longest]) / self.cost)

    @cached_property
    def peak(self) -> tuple[float, ...]:
        """The most activations that each rank holds at once, in those of one whole rank of one microbatch."""
        return tuple(
            max((level.during for level in levels((span.action for span in spans), self.sizes)), default=0.0)
            for spans in self.spans
        )

    def held(self, rank: int) -> list[tuple[float, float]]:
        """`rank`'s activations over time, from 0: (when, how many from then on), one entry a change."""
        curve = {0.0: 0.0}
        spans = self.spans[rank]
        for span, level in zip(spans, levels((span.action for span in spans), self.sizes), strict=True):
            curve[span.start] = level.during
            curve[span.end] = level.after
        points = list(curve.items())
        return points[:1] + [point for before, point in pairwise(points) if point[1] != before[1]]
