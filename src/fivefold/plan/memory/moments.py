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
    peaks: dict[tuple[str, int, int, bool], tuple[int, Action, float, frozenset[int], frozenset[int]]] = {}
    most: dict[tuple[str, int, int, bool], float] = {}
    changes, before = 0, 0.0
    for number, (action, level) in enumerate(zip(actions, held, strict=True)):
        kind, stage, _ = action
        during, after = level
        activations = during if during > before else before
        alike = kind, stage, changes, left[stage] == 1
        if activations > most.get(alike, -1.0):
            most[alike] = activations
            peaks[alike] = number, action, activations, begun, over
        if kind in "BW":
            left[stage] -= 1
            if stage not in begun or not left[stage]:
                changes += 1
                begun, over = begun | {stage}, over if left[stage] else over | {stage}
        before = after
    return [
        (action, Come(begun, over, last), activations)
        for (_, _, _, last), (_, action, activations, begun, over) in sorted(peaks.items(), key=lambda peak: peak[1][0])
    ]
