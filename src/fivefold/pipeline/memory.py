"""The activations that a rank holds, action by action. They follow from the order alone, whatever the actions take.

A stage holds three sizes for a microbatch: one from the start of F to the end of I (or B), one from there to the end of
W, and one while I or B runs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from fivefold.pipeline.schedule import Action
from fivefold.pipeline.times import Sizes


class Level(NamedTuple):
    """What a rank holds, in activations of one whole rank of one microbatch."""

    during: float
    """While the action runs."""
    after: float
    """Once it has ended."""


def levels(actions: Iterable[Action], sizes: Sizes) -> Iterator[Level]:
    """What a rank holds during and after each of its actions, in their order.

    Microbatches are counted and then multiplied, so that a rank that has returned everything holds exactly 0.
    """
    forward: dict[int, int] = {}
    weight: dict[int, int] = {}
    held = 0.0
    for kind, stage, _ in actions:
        transient = 0.0
        before = held
        if kind == "F":
            forward[stage] = forward.get(stage, 0) + 1
        elif kind == "W":
            weight[stage] = weight.get(stage, 0) - 1
        else:
            transient = sizes.transient[stage]
            forward[stage] = forward.get(stage, 0) - 1
            if kind == "I":
                weight[stage] = weight.get(stage, 0) + 1
        held = 0.0
        for one, count in forward.items():
            held += count * sizes.forward[one]
        for one, count in weight.items():
            held += count * sizes.weight[one]
        yield Level(held if kind == "F" else before + transient, held)
