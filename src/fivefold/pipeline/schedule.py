"""A pipeline schedule is data: for each rank, the list of what it computes, one action after the other.

Everything else reads this list: it is checked, simulated, drawn and executed as it stands. Communication is not in it;
what has to travel follows from the actions. The text of an action is torch's (`3I0`), so schedules can be exchanged as
CSV files. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""Forward; full backward; its two halves, the gradient of the input and that of the weights."""
KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
PAIR = "OVERLAP_F_B"
"""Torch's word for a forward and a backward of two microbatches that run together."""


class Action(NamedTuple):
    """One computation of one stage on one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Pair(NamedTuple):
    """The forward of one microbatch and the backward of another, which a rank may mix."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward}){PAIR}"


Step = Action | Pair


def actions_of(step: Step) -> tuple[Action, ...]:
    """The actions of a step, in the order in which they begin."""
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline computes in one optimizer step."""

    name: str
    ranks: tuple[tuple[Step, ...], ...]
    """Each rank's steps, in order."""
    placement: tuple[int, ...]
    """Which rank has each stage."""
    microbatches: int

    @property
    def stages(self) -> int:
        """Parts into which the model is cut."""
        return len(self.placement)

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Each rank's actions, in order, pairs taken apart."""
        return tuple(tuple(action for step in steps for action in actions_of(step)) for steps in self.ranks)

    @property
    def splits(self) -> bool:
        """Whether some backward comes in two halves."""
        return any(action.kind == "W" for _, action in self.all_actions())

    def stages_of(self, rank: int) -> list[int]:
        """The stages that `rank` has, in ascending order."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    def all_actions(self) -> Iterator[tuple[int, Action]]:
        """Every action with its rank."""
        return ((rank, action) for rank, actions in enumerate(self.actions) for action in actions)


def looped(ranks: int, chunks: int) -> tuple[int, ...]:
    """The placement in which stages go around the ranks: stage s is on rank s mod ranks."""
    return tuple(range(ranks)) * chunks


def v_shaped(ranks: int) -> tuple[int, ...]:
    """The placement of two chunks a rank in which stages go down the ranks and up again: first and last on rank 0."""
    return (*range(ranks), *reversed(range(ranks)))


def forward_only(placement: tuple[int, ...], microbatches: int) -> Schedule:
    """The forwards alone, as validation runs them: groups of as many microbatches as ranks, stage by stage.

    All stages of all ranks follow one common order, so no circle can arise, wherever the stages are.
    """
    ranks = max(placement) + 1
    ordered: list[list[Step]] = [[] for _ in range(ranks)]
    for first in range(0, microbatches, ranks):
        for stage, rank in enumerate(placement):
            ordered[rank] += (Action("F", stage, m) for m in range(first, min(first + ranks, microbatches)))
    return Schedule("forward-only", tuple(map(tuple, ordered)), placement, microbatches)
