"""Which of a rank's actions can be its fullest moment: of those that differ only in what they hold, the fullest one.

State depends on few things, so that of thousands of actions some dozen are left to be looked at. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fivefold.pipeline.memory import Level
from fivefold.pipeline.schedule import Action


class Come(NamedTuple):
    """How far a rank has come in its step, as far as its state depends on it."""

    begun: frozenset[int]
    """Stages of which a backward has ended."""
    over: frozenset[int]
    """Stages whose last backward has."""
    last: bool
    """Whether the action is the last backward of its stage."""


def fullest(actions: Sequence[Action], held: Iterable[Level], left: dict[int, int]) -> list[tuple[Action, Come, float]]:
    """Of the actions of a rank that are alike but for the activations it holds, the first with the most of them.

    `left` are the backwards that each stage has before it.
    """
    begun, over = frozenset[int](), frozenset(stage for stage, count in left.items() if not count)
    peaks: dict[tuple[str, int, Come], tuple[int, Action, float]] = {}
    before = 0.0
    for number, (action, level) in enumerate(zip(actions, held, strict=True)):
        kind, stage, _ = action
        come = Come(begun, over, left[stage] == 1)
        activations = max(level.during, before)
        if activations > peaks.get((kind, stage, come), (0, action, -1.0))[2]:
            peaks[kind, stage, come] = number, action, activations
        if kind in "BW":
            left[stage] -= 1
            begun = begun if stage in begun else begun | {stage}
            over = over if left[stage] else over | {stage}
        before = level.after
    ordered = sorted((*found, come) for (_, _, come), found in peaks.items())
    return [(action, come, activations) for _, action, activations, come in ordered]
