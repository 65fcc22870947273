"""What the actions of a schedule take, and what they keep: the simulator's input. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.pipeline.schedule import Action

SHORTEST, LONGEST = 1e-100, 1e100
"""Between these lie times of which a schedule's sums, products and ratios are numbers."""


@dataclass(frozen=True)
class Times:
    """Seconds (or any unit, the same throughout) of each stage's actions, and of the transfers between ranks."""

    forward: tuple[float, ...]
    """Of each stage's F."""
    input: tuple[float, ...]
    """Of each stage's I, the gradient of its input."""
    weight: tuple[float, ...]
    """Of each stage's W, the gradients of its weights; a full backward B takes input + weight."""
    latency: float = 0.0
    """Of a transfer between two ranks, however large."""
    transfer: float = 0.0
    """Of what an activation's bytes take on a link beside the latency; a link carries one at a time."""
    overlap: bool = True
    """Whether transfers run beside computation; else sender and receiver are busy with them."""

    @classmethod
    def uniform(cls, stages: int, forward: float, input: float, weight: float, latency: float = 0.0) -> Times:
        """The same for every stage."""
        return cls((forward,) * stages, (input,) * stages, (weight,) * stages, latency)

    def of(self, action: Action) -> float:
        """What `action` takes."""
        kind, stage = action.kind, action.stage
        if kind == "F":
            return self.forward[stage]
        if kind == "I":
            return self.input[stage]
        if kind == "W":
            return self.weight[stage]
        return self.input[stage] + self.weight[stage]


@dataclass(frozen=True)
class Sizes:
    """What a stage holds for one microbatch, in activations of one whole rank (all its stages) of one microbatch."""

    forward: tuple[float, ...]
    """From F to the end of I (or B)."""
    weight: tuple[float, ...]
    """From I to the end of W."""
    transient: tuple[float, ...]
    """During I or B, beside the other two."""

    @classmethod
    def uniform(cls, placement: Sequence[int], weight: float = 1.0, transient: float = 0.0) -> Sizes:
        """Each rank's activations in equal parts on its stages; the other two as shares of that."""
        chunks = len(placement) // (max(placement) + 1)
        share = 1.0 / chunks
        stages = len(placement)
        return cls((share,) * stages, (share * weight,) * stages, (share * transient,) * stages)
