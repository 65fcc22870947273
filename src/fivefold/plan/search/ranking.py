"""The best layout of each family that a search has found so far, and below which time another is worth a look.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fivefold.plan.search.reasons import Layout


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
        """The fastest first."""
        ordered = sorted(self.best.values(), key=lambda each: each.step.seconds)
        return tuple(ordered[: self.top])
