"""Schedules written out by hand: one line of steps a rank, sound or not."""

from __future__ import annotations

import re

from fivefold.pipeline.schedule import Action, Pair, Schedule, Step, looped


def schedule(*lines: str, placement: tuple[int, ...] | None = None, microbatches: int | None = None) -> Schedule:
    """The schedule of the ranks whose steps the lines hold; stage s is on rank s, and all microbatches occur."""
    ranks = tuple(tuple(step(text) for text in line.split()) for line in lines)
    seen = [int(number) for number in re.findall(r"\d+[FBIW](\d+)", " ".join(lines))]
    placement = looped(len(lines), 1) if placement is None else placement
    return Schedule("written", ranks, placement, 1 + max(seen) if microbatches is None else microbatches)


def step(text: str) -> Step:
    parts = [
        Action(kind, int(stage), int(microbatch))  # type: ignore[arg-type]
        for stage, kind, microbatch in re.findall(r"(\d+)([FBIW])(\d+)", text)
    ]
    return parts[0] if len(parts) == 1 else Pair(*parts)
