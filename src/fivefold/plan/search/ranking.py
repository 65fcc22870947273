"""The best layout of each family that a search has found so far, and below which time another is worth a look.

What is shown first is recommended. Times that differ by less than `ALIKE` cannot be told apart, so of the layouts that
are as near to the fastest it is one that leaves room in memory, and then one with little tp and cp. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fivefold.plan.search.reasons import Layout

ALIKE = 0.03
"""Half of the difference above which nineteen of twenty pairs of published runs come out in the right order."""


@dataclass
class Ranking:
    """The best layout of each family so far."""

    top: int
    best: dict[tuple[int, ...], Layout] = field(default_factory=dict)

    def limit(self, family: tuple[int, ...]) -> float:
        """Seconds below which a layout of this family would be shown."""
        mine = self.best.get(family)
        return self.worst() if mine is None else min(self.worst(), mine.step.seconds)

    def worst(self) -> float:
        """Seconds that every layout that is still to come must stay below."""
        seconds = sorted(each.step.seconds for each in self.best.values())
        return seconds[self.top - 1] if len(seconds) >= self.top else float("inf")

    def add(self, family: tuple[int, ...], layout: Layout) -> None:
        """As the best of its family."""
        self.best[family] = layout

    def shown(self) -> tuple[Layout, ...]:
        """The recommended one first, then the fastest."""
        ordered = sorted(self.best.values(), key=lambda each: each.step.seconds)[: self.top]
        alike = [each for each in ordered if each.step.seconds <= (1 + ALIKE) * ordered[0].step.seconds]
        first = min(alike, key=_plainness, default=None)
        return tuple(sorted(ordered, key=lambda each: each is not first))


def _plainness(layout: Layout) -> tuple[bool, int, int, float]:
    parallel = layout.run.parallel
    return layout.tight, parallel.tp, parallel.cp, layout.step.seconds
