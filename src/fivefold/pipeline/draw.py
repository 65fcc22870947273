"""What the drawings of a schedule have in common: timelines under each other on one time scale, and how they are said.

`draw_text.py` draws for a terminal, `draw_svg.py` a picture, `page.py` a page around it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fivefold.pages import say
from fivefold.pipeline.schedule import Kind
from fivefold.pipeline.timeline import Timeline

NAMES: dict[Kind, str] = {
    "F": "forward",
    "B": "both gradients",
    "I": "gradient of the input",
    "W": "gradient of the weights",
}


@dataclass(frozen=True)
class Panel:
    """One timeline of a drawing."""

    title: str
    timeline: Timeline
    unit: str = ""
    """Of its times, such as s; empty if they are relative."""

    @cached_property
    def chunk(self) -> dict[int, int]:
        """Of each stage: how many of its rank's other stages come before it."""
        held = [sorted({span.action.stage for span in spans}) for spans in self.timeline.spans]
        return {stage: chunk for stages in held for chunk, stage in enumerate(stages)}

    @property
    def chunks(self) -> int:
        """Stages of the rank that has the most."""
        return 1 + max(self.chunk.values(), default=0)

    def time(self, value: float) -> str:
        """A time with its unit."""
        return f"{say(value)} {self.unit}".rstrip()

    def numbers(self) -> list[tuple[str, str]]:
        """What the timeline comes to: name and value of each number."""
        timeline = self.timeline
        return [
            ("makespan", self.time(timeline.makespan)),
            ("longest rank", self.time(timeline.cost)),
            ("bubble", f"{timeline.bubble:.4f}"),
            ("peak activations by rank", " ".join(map(say, timeline.peak))),
        ]


def last_end(panels: Sequence[Panel]) -> float:
    """When the last action of all panels ends, which is the right edge of each; never 0."""
    return max((panel.timeline.makespan for panel in panels), default=0.0) or 1.0
