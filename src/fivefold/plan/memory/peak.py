"""The memory of a run on each pipeline rank: by category, at the moment at which the rank holds most.

The schedule's actions are walked in their order, as the executor runs them: what waits for its backward, whose weights
are gathered, whose gradients are there. Inside a backward its units are walked from the last to the first. The moments
that can be the fullest are the loss, each unit's backward, and the update. All ranks of a stage are alike: shown is one
that has the most where pieces are uneven. Other stacks are counted by what they document (`software.py`), ours as it is
built. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from fivefold.config.run import Run
from fivefold.config.schedules import is_file
from fivefold.pipeline.memory import levels
from fivefold.pipeline.of_run import microbatches_of, schedule_of_run
from fivefold.pipeline.schedule import Action
from fivefold.pipeline.stage_bytes import sizes_of
from fivefold.pipeline.stages import stage_layers
from fivefold.plan.cluster import Cluster
from fivefold.plan.memory.moments import fullest
from fivefold.plan.memory.overhead import GIB, Overhead, overhead_of
from fivefold.plan.memory.readings import Filled, Readings
from fivefold.plan.memory.shards import NOTHING, Held, Parts
from fivefold.plan.memory.stage import Stage, Stages
from fivefold.plan.memory.state import Bytes, Moment, State, state_of
from fivefold.plan.software import Software

CATEGORIES = {
    "weights": "this rank's pieces of the weights, in the format in which they are kept",
    "optimizer": "moments (and master weights beside 16-bit ones) of this rank's pieces",
    "gradients": "as the optimizer takes them, or in the buffer in which they are accumulated",
    "unaccounted_state": "what the stack was measured to hold beside its formula, a parameter",
    "gathered_weights": "whole weights in the compute format: of the stage, or with ZeRO 3 of two units",
    "unreduced_gradients": "whole gradients before their reduction: through the step, or of the unit in backward",
    "activations": "what microbatches under way keep for backward, and weight gradients that wait",
    "working": "what the unit in backward computes again, and its largest gradients",
    "logits": "of a chunk of tokens, or of a microbatch, with what the loss makes of them and the head's gradient",
    "communication": "buffers into which weights are gathered, and messages between stages",
}
"""What each category is, in the order in which they are shown."""


@dataclass(frozen=True)
class RankMemory(Readings):
    """What a pipeline rank holds at its fullest moment, in bytes."""

    categories: ClassVar = CATEGORIES
    pp: int
    stages: tuple[int, ...]
    moment: str
    """When that is."""
    parts: Bytes
    """By category."""
    held: Held
    """Elements of the parameters of its stages."""
    microbatch: float
    """Bytes that its stages keep of a microbatch between forward and backward."""
    overhead: Overhead
    capacity: float
    """Of the accelerator."""

    def formula(self, category: str) -> str:
        """ " = 4 bytes x 1,000 pieces", for a category that is a multiple of something; else nothing."""
        size, held = self.parts.get(category, 0.0), self.held
        if category in ("weights", "optimizer") and held.piece:
            return f" = {size / held.piece:.3g} bytes x {held.piece:,.0f} of its pieces"
        if category in ("gradients", "gathered_weights", "unreduced_gradients") and held.whole:
            return f" = {size / held.whole:.3g} bytes x {held.whole:,.0f} parameters"
        if category == "activations" and self.microbatch:
            return f" = {size / self.microbatch:.3g} microbatches x {self.microbatch / GIB:.3g} GiB"
        return ""

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return super().json() | {"moment": self.moment}


@dataclass(frozen=True)
class Memory(Filled[RankMemory]):
    """What the ranks of a run hold."""

    ranks: tuple[RankMemory, ...]
    """By pipeline rank."""
    capacity: float

    def read_as(self, kind: str) -> float:
        """The fullest rank's peak as `allocated`, `reserved` or `nvidia-smi` would show it; else as allocated."""
        readings = {"reserved": self.worst.reserved, "nvidia-smi": self.worst.nvidia_smi}
        return readings.get(kind, self.worst.allocated)

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return super().json() | {"explanation": self.explanation()}

    def explanation(self) -> list[str]:
        """Each figure of the fullest rank: a line with what it is and its number, and the sums."""
        worst = self.worst
        stages = ", ".join(map(str, worst.stages))
        lines = [
            f"pipeline rank {worst.pp} (stage {stages}) is the fullest: {worst.moment}",
            f"its stages have {worst.held.whole:,.0f} parameters after tp and ep, of which a rank's pieces are "
            f"{worst.held.piece:,.0f}; they keep {worst.microbatch / GIB:.3g} GiB of a microbatch",
        ]
        lines += [
            f"{name.replace('_', ' ')} {size / GIB:.2f} GiB{worst.formula(name)}: {meaning}"
            for name, meaning in CATEGORIES.items()
            if (size := worst.parts.get(name, 0.0))
        ]
        verdict = "fits" if self.fits else "does not fit"
        return [
            *lines,
            f"allocated {worst.allocated / GIB:.2f} GiB: their sum",
            *worst.readings(),
            f"{verdict} in {self.capacity / GIB:.2f} GiB",
        ]


def memory(run: Run, cluster: Cluster, software: Software) -> Memory:
    """The memory of a legal run whose ranks and vocabulary are known, on `cluster` by `software`.

    Raises UserError if the pipeline's schedule cannot run.
    """
    walk, overhead, capacity = _Walk(run, software), overhead_of(run, software), cluster.accelerator.memory
    ranks = (RankMemory(*rank, *walk.amounts(rank[1]), overhead, capacity) for rank in walk.ranks())
    return Memory(tuple(ranks), capacity)


class _Walk:
    """Walks the actions of each rank."""

    def __init__(self, run: Run, software: Software) -> None:
        self._state: State = state_of(run, software)
        self._stages: list[Stage] = _stages(run, software)
        whole = run.model.tied and len(self._stages) == 1
        self._parts = [Parts([unit.held for unit in stage.units], tied=whole) for stage in self._stages]
        self._actions, self._placement = _actions(run)
        self._sizes = sizes_of(stage.sizes for stage in self._stages)

    def ranks(self) -> Iterator[tuple[int, tuple[int, ...], str, Bytes]]:
        """By pipeline rank: its number, its stages, its fullest moment and what it holds then."""
        for rank in range(len(self._actions)):
            stages = tuple(stage for stage, holder in enumerate(self._placement) if holder == rank)
            moment, parts = max(self._moments(rank, stages), key=lambda each: sum(each[1].values()))
            yield rank, stages, moment, parts

    def amounts(self, stages: tuple[int, ...]) -> tuple[Held, float]:
        """What these stages have of the parameters, and keep of a microbatch."""
        held = sum((self._parts[stage].all for stage in stages), NOTHING)
        return held, sum(self._stages[stage].sizes.forward for stage in stages)

    def _moments(self, rank: int, stages: tuple[int, ...]) -> Iterator[tuple[str, Bytes]]:
        actions = self._actions[rank]
        always = _sum(*(self._state.always(self._parts[stage]) for stage in stages))
        backwards = Counter(stage for kind, stage, _ in actions if kind in "BW")
        left = {stage: backwards[stage] for stage in stages}
        for action, come, activations in fullest(actions, levels(actions, self._sizes), left):
            others = (
                self._state.between(self._parts[other], other in come.begun, other in come.over)
                for other in stages
                if other != action.stage
            )
            first = action.stage not in come.begun
            yield from self._during(action, first, come.last, activations, _sum(always, *others))
        yield "the update", _sum(always, *(self._state.between(self._parts[stage], True, True) for stage in stages))

    def _during(
        self, action: Action, first: bool, last: bool, activations: float, base: Bytes
    ) -> Iterator[tuple[str, Bytes]]:
        """The moments of one action."""
        stage = self._stages[action.stage]
        units = stage.units
        parts = self._parts[action.stage]
        messages = 2 * stage.boundary if len(self._placement) > 1 else 0.0
        if action.kind == "F":
            if not stage.logits:
                return
            table = self._state.head_gradient(parts, first)
            now = _sum(base, self._state.during(parts, Moment(len(units), first, False)))
            extra = {"activations": activations, "logits": stage.logits + table, "communication": messages}
            yield f"the loss of microbatch {action.microbatch}", _sum(now, extra)
            return
        if action.kind == "W":
            now = _sum(base, self._state.during(parts, Moment(0, first, last)))
            extra = {"activations": activations, "communication": messages}
            yield f"weight gradients of stage {action.stage}, microbatch {action.microbatch}", _sum(now, extra)
            return
        freed = 0.0
        for number in reversed(range(len(units))):
            unit = units[number]
            ends = last and action.kind == "B"
            begins = first and action.kind == "B"
            now = _sum(base, self._state.during(parts, Moment(number, begins, ends)))
            extra = {"activations": activations - freed, "working": unit.working, "communication": messages}
            yield f"backward of {unit.name}, microbatch {action.microbatch}", _sum(now, extra)
            freed += unit.kept - (unit.waiting if action.kind == "I" else 0.0)


def _sum(*parts: Bytes) -> Bytes:
    """Several together, by category."""
    added: Bytes = {}
    for part in parts:
        for name, size in part.items():
            added[name] = added.get(name, 0.0) + size
    return added


def _stages(run: Run, software: Software) -> list[Stage]:
    made, layers = Stages(run, software), stage_layers(run)
    return [made.stage(each, stage == 0, stage == len(layers) - 1) for stage, each in enumerate(layers)]


def _actions(run: Run) -> tuple[list[list[Action]], tuple[int, ...]]:
    """Each pipeline rank's actions, and the rank of each stage. Of many microbatches so many as show the peak."""
    stages = run.parallel.pp * run.parallel.chunks
    if stages == 1 and not is_file(run.parallel.schedule):
        microbatches = min(2, microbatches_of(run))
        return [[Action(kind, 0, m) for m in range(microbatches) for kind in ("F", "B")]], (0,)
    schedule = schedule_of_run(_shorter(run))
    return [list(schedule.actions[rank]) for rank in range(len(schedule.ranks))], schedule.placement


def _shorter(run: Run) -> Run:
    """The run with fewer microbatches: so many that its schedule has long come to its steady state."""
    most, here = 4 * run.parallel.pp, microbatches_of(run)
    if here <= most + run.parallel.pp or is_file(run.parallel.schedule):
        return run
    batch = run.batch
    assert run.parallel.dp != "auto", "the ranks are known"
    size = (most + here % run.parallel.pp) * batch.micro_size * run.parallel.dp
    return run.model_copy(update={"batch": batch.model_copy(update={"global_size": size})})
