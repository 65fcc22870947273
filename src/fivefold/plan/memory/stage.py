"""A stage as units, each with what it has of the parameters and what it keeps of a microbatch: embedding, layers, head.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

from fivefold.config.run import Run
from fivefold.model.spec import Shapes, is_moe, layer_shapes, mtp_shapes, vocabulary
from fivefold.pipeline.stage_bytes import StageBytes
from fivefold.plan.memory.layers import StackLayers
from fivefold.plan.memory.own_layers import OwnLayers
from fivefold.plan.memory.shards import Held, Shards
from fivefold.plan.software import Software


class Layers(Protocol):
    """What layers keep and need, in bytes of one rank and microbatch."""

    def kept(self, number: int) -> float:
        """From forward to backward."""

    def waiting(self, number: int) -> float:
        """From I to the end of W."""

    def working(self, number: int) -> float:
        """Beside what is kept, in backward."""

    def embedding(self) -> float:
        """Kept by the embedding."""

    def head(self) -> float:
        """Kept by the head."""

    def logits(self) -> float:
        """While the loss is computed."""

    def boundary(self) -> float:
        """Sent between stages."""


def layers_of(run: Run, software: Software) -> Layers:
    """Those of our own stack, or of another."""
    return OwnLayers(run, software.hot_experts) if software.name == "fivefold" else StackLayers(run, software)


@dataclass(frozen=True)
class Unit:
    """A part of a stage that is gathered, computed and reduced as one."""

    name: str
    held: Held
    kept: float
    waiting: float
    working: float


@dataclass(frozen=True)
class Stage:
    """Its units in the order of forward."""

    units: tuple[Unit, ...]
    logits: float
    """While the loss is computed, on the last stage; else 0."""
    boundary: float
    """Of a message to or from a neighbour."""

    @property
    def sizes(self) -> StageBytes:
        """What a microbatch adds; state is elsewhere."""
        return StageBytes(0.0, sum(unit.kept for unit in self.units), sum(unit.waiting for unit in self.units))


class Stages:
    """Makes the stages of a run. Layers that are alike are counted once."""

    def __init__(self, run: Run, software: Software) -> None:
        self._run, self._layers, self._shards = run, layers_of(run, software), Shards(run)
        self._alike = cache(self._unit)

    def stage(self, layers: Sequence[int], first: bool, last: bool) -> Stage:
        """The stage that has the layers of these numbers; `first` with the embedding, `last` with the head."""
        model, counts = self._run.model, self._layers
        units = [self._edge("embedding", first, last, counts.embedding())] if first else []
        units += [self._layer(number) for number in layers]
        if last:
            units += [self._depth(depth) for depth in range(model.mtp)]
            units.append(self._edge("head", first, last, counts.head()))
        return Stage(tuple(units), counts.logits() if last else 0.0, counts.boundary())

    def _layer(self, number: int) -> Unit:
        """By what it is made of and keeps; the first that is alike stands for all."""
        again = number % self._run.recompute.every == 0
        unit = self._alike(is_moe(self._run.model, number), again, self._layers.kept(number))
        if unit.name != f"layer {number}":
            unit = replace(unit, name=f"layer {number}")
        return unit

    def _unit(self, moe: bool, again: bool, kept: float) -> Unit:
        model, every, counts = self._run.model, self._run.recompute.every, self._layers
        alike = (n for n in range(model.layers) if is_moe(model, n) == moe and (n % every == 0) == again)
        number = next(n for n in alike if counts.kept(n) == kept)
        held = self._shards.of(layer_shapes(model, number))
        return Unit(f"layer {number}", held, kept, counts.waiting(number), counts.working(number))

    def _depth(self, depth: int) -> Unit:
        number = self._run.model.layers + depth
        held, counts = self._shards.of(mtp_shapes(self._run.model, depth)), self._layers
        return Unit(f"depth {depth + 1}", held, counts.kept(number), counts.waiting(number), counts.working(number))

    def _edge(self, name: str, first: bool, last: bool, kept: float) -> Unit:
        """The embedding, or the head with the last norm: its own table, a copy of the embedding's, or none."""
        model = self._run.model
        table: Shapes = {"weight": (vocabulary(model), model.hidden)}
        norms: Shapes = {f"norm.{part}": (model.hidden,) for part in ("weight", "bias")[: 1 + self._norm_has_bias]}
        if name == "embedding":
            held = self._shards.of(table | (norms if model.embedding_norm else {}))
        elif not model.tied:
            held = self._shards.of(table | norms)
            held = held if first or not model.mtp else held + self._copy(table)
        else:
            held = self._shards.of(norms) + (Held() if first else self._copy(table))
        return Unit(name, held, kept, 0.0, 0.0)

    @property
    def _norm_has_bias(self) -> bool:
        return self._run.model.bias and self._run.model.norm == "layernorm"

    def _copy(self, table: Shapes) -> Held:
        held = self._shards.of(table)
        return replace(held, copies=held.piece, tensors=0)
