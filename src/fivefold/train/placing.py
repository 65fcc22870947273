"""Moving experts between ranks at checkpoints, after the load that was measured since the last one.

A checkpoint belongs to no layout, so it holds experts in the order of their numbers: they travel there before it is
copied, and from there to their new slots. Which those are is among its numbers, for a start that goes on from it. All
ranks count the same choices and so decide the same, for all layers; each moves those of its own stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fivefold.config.run import Run
from fivefold.model.moe import MoE, Router
from fivefold.model.spec import moe_layers
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.move_experts import move_experts
from fivefold.parallel.placement import Placement, fullest, in_order, placed_anew
from fivefold.pipeline.execute import Pipeline

KEY = "expert_slots"
"""Of the placements among the numbers of a checkpoint."""


class Moved(NamedTuple):
    """What a new placement changes."""

    layers: int
    before: float
    """Load of the fullest rank in any of these layers, over the mean of the ranks."""
    after: float


class ExpertPlacement:
    """Where each layer's experts lie. With `routing.placement` fixed there is nothing to count, decide or move."""

    def __init__(self, run: Run, pipeline: Pipeline, optimizer: ShardedOptimizer, mesh: Mesh) -> None:
        self._optimizer, self._mesh = optimizer, mesh
        self._groups = 1 if run.model.moe is None else run.model.moe.groups
        by_load = run.model.moe is not None and run.routing.placement == "load"
        self._layers = _layers(pipeline) if by_load else {}
        self._order = in_order(run.model.moe.experts) if run.model.moe is not None else ()
        self._slots: dict[int, Placement] = dict.fromkeys(self._layers, self._order)
        """Where the experts of this rank's stages lie."""
        self._wanted: dict[int, Placement] = dict.fromkeys(moe_layers(run.model) if by_load else (), self._order)
        """Where those of all layers lie after the next checkpoint."""
        self._choices = {number: [0] * len(self._order) for number in self._wanted}

    def count(self, choices: Mapping[int, Sequence[int]]) -> None:
        """Take in how often each expert was chosen in a step, by the number of its layer."""
        for number, before in self._choices.items():
            self._choices[number] = [old + new for old, new in zip(before, choices[number], strict=True)]

    def decide(self) -> Moved | None:
        """Choose where experts shall lie from what was counted, and count anew. None if all stay."""
        ranks, changes = self._mesh.parallel.ep, []
        for number, choices in self._choices.items():
            before = self._wanted[number]
            after = self._wanted[number] = placed_anew(choices, before, ranks, self._groups)
            self._choices[number] = [0] * len(choices)
            if after != before:
                changes.append((fullest(choices, before, ranks), fullest(choices, after, ranks)))
        return Moved(len(changes), *map(max, zip(*changes, strict=True))) if changes else None

    @contextmanager
    def experts_in_order(self) -> Iterator[None]:
        """While this lasts experts lie in the order of their numbers, and then where `decide` wants them.

        A collective call: entering and leaving move them.
        """
        self._move(dict.fromkeys(self._layers, self._order))
        yield
        self._move(self._wanted)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {KEY: {str(number): list(slots) for number, slots in self._wanted.items()}} if self._wanted else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Move experts to where they lay when a checkpoint was saved, which was loaded; a collective call."""
        stored = state.get(KEY, {})
        self._wanted |= {number: tuple(stored[str(number)]) for number in self._wanted if str(number) in stored}
        self._move(self._wanted)

    def _move(self, wanted: Mapping[int, Placement]) -> None:
        """Move the experts of this rank's stages to where they are wanted."""
        moving = {number: slots for number, slots in self._slots.items() if wanted[number] != slots}
        tensors = self._optimizer.state() if moving else {}
        for number, before in moving.items():
            after, layer = wanted[number], self._layers[number]
            for name in layer.parameters:
                of_parameter = [tensor for key, tensor in tensors.items() if key.endswith(f".{name}")]
                for tensor in (self._optimizer.parameters[name].whole, *of_parameter):
                    if isinstance(tensor, DTensor):  # a count of steps is the same for all
                        move_experts(tensor, before, after, self._mesh)
            placed = None if after == self._order else torch.tensor(after, device=self._mesh.device)
            layer.router.placement = placed
            self._slots[number] = after
        if moving:
            self._optimizer.weights_changed()


class _Layer(NamedTuple):
    router: Router
    parameters: list[str]
    """Names of its experts' weights."""


def _layers(pipeline: Pipeline) -> dict[int, _Layer]:
    """The layers with experts of this rank's stages, by their number."""
    return {
        module.number: _Layer(
            module.router, [f"{prefix}.experts.{name}" for name, _ in module.experts.named_parameters()]
        )
        for stage in pipeline.stages.values()
        for prefix, module in stage.named_modules()
        if isinstance(module, MoE)
    }
