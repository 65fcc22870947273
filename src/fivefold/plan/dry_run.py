"""What one rank of any world holds, found by building it: its model and its optimizer, as training makes them.

The process pretends to be that rank, of ranks that do not exist, and what it builds has shapes and formats but no
memory. So a laptop builds any rank of 16,384. The only module of this room that loads torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold._torch import pretended_rank, without_memory
from fivefold.config.run import Run
from fivefold.model.spec import parameters as model_parameters
from fivefold.model.spec import vocabulary
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.grid import Grid, Role
from fivefold.parallel.mesh import mesh_of
from fivefold.parallel.state import TIED_COPY, local_part, sharded_parameters
from fivefold.parallel.zero import DTYPES, reduce_dtype
from fivefold.pipeline.stages import stage_layers
from fivefold.plan.ranks import say_degrees, say_numbers
from fivefold.plan.table import long_table_lines, table_lines
from fivefold.train.build import build_stages

META, CPU = torch.device("meta"), torch.device("cpu")


@dataclass(frozen=True)
class HeldParameter:
    """One parameter of the rank's stages, and the bytes that this rank has for it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    local_shape: tuple[int, ...]
    """Of this rank's shard."""
    dtype: str
    copies: int
    """Ranks that hold this same shard."""
    copy_of: str | None
    """The other stage's parameter whose copy it is: a tied embedding in the head. It is no parameter of its own."""
    weight: int
    """Of the shard, in the master format."""
    gradient: int
    """Of the shard's gradient, reduced, in the master format."""
    moments: dict[str, int]
    """Of what the optimizer keeps for the shard, by its name for it."""
    gathered_weight: int
    """Of what tp (or ep) leaves of the parameter, as it is gathered in the compute format."""
    unreduced_gradient: int
    """Of its gradient before the reduction, in the reduce format."""

    @property
    def elements(self) -> int:
        """Of the whole parameter."""
        return prod(self.shape)

    @property
    def local_elements(self) -> int:
        """Of this rank's shard."""
        return prod(self.local_shape)


@dataclass(frozen=True)
class RankBuild:
    """What a rank holds; sizes in bytes."""

    run: Run
    grid: Grid
    rank: int
    stages: dict[int, range]
    """Its stages by number, with the numbers of their layers."""
    parameters: list[HeldParameter]
    notes: tuple[str, ...]

    @property
    def role(self) -> Role:
        """Where the rank stands."""
        return self.grid.role(self.rank)

    @property
    def counts(self) -> dict[str, int]:
        """Parameters of the whole model, of the rank's stages, and of its shards; copies are not counted."""
        own = [parameter for parameter in self.parameters if parameter.copy_of is None]
        stages = sum(parameter.elements for parameter in own)
        return {
            "model": stages if self.grid.pp == 1 else model_parameters(self.run.model).total,
            "stages": stages,
            "rank": sum(parameter.local_elements for parameter in own),
        }

    @property
    def bytes(self) -> dict[str, int]:
        """What the rank holds all the time, then what it has gathered while it computes."""
        return {
            "weights": sum(parameter.weight for parameter in self.parameters),
            "gradients": sum(parameter.gradient for parameter in self.parameters),
            "moments": sum(sum(parameter.moments.values()) for parameter in self.parameters),
            "gathered_weights": sum(parameter.gathered_weight for parameter in self.parameters),
            "unreduced_gradients": sum(parameter.unreduced_gradient for parameter in self.parameters),
        }

    def json(self) -> dict[str, Any]:
        """All of it as plain values, every parameter included."""
        return {
            "name": self.run.name,
            "rank": self.rank,
            "world": self.grid.world,
            "role": self.role._asdict(),
            "stages": list(self.stages),
            "layers": [layer for layers in self.stages.values() for layer in layers],
            "counts": self.counts,
            "bytes": self.bytes,
            "offload": list(self.run.offload),
            "parameters": [asdict(parameter) for parameter in self.parameters],
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """All of it for a terminal, a long table shortened."""
        where = ", ".join(f"{axis} {place}" for axis, place in self.role._asdict().items())
        head = ("parameter", "whole", "here", "format", "copies")
        counts = self.counts
        return [
            f"run {self.run.name}: {say_degrees(self.grid)}",
            f"rank {self.rank} stands at {where}, and has {self._say_layers()}",
            "",
            *long_table_lines(head, self._cells, len(self.parameters), "parameters"),
            "",
            f"parameters: {counts['model']:,} in the model, {counts['stages']:,} in {self._say_stages()}, "
            f"{counts['rank']:,} here",
            "",
            *self._size_lines(),
            *(f"note: {note}" for note in self.notes),
        ]

    def _say_layers(self) -> str:
        """ "layers 0 to 3", or "stages 0 and 7 (layers 0, 1; 14, 15)"."""
        layers = "; ".join(map(say_numbers, self.stages.values()))
        if len(self.stages) == 1:
            return f"layers {layers}"
        return f"stages {say_numbers(list(self.stages))} (layers {layers})"

    def _say_stages(self) -> str:
        return "this stage" if len(self.stages) == 1 else "these stages"

    def _cells(self, number: int) -> list[str]:
        held = self.parameters[number]
        name = held.name if held.copy_of is None else f"{held.name} (copy of {held.copy_of})"
        return [name, _say_shape(held.shape), _say_shape(held.local_shape), held.dtype, str(held.copies)]

    def _size_lines(self) -> list[str]:
        sizes, zero, batch = self.bytes, self.run.parallel.zero, self.run.batch
        accumulates = batch.global_size > batch.micro_size * self.grid.dp
        pipelined = self.run.parallel.pp * self.run.parallel.chunks > 1
        unit, step = "one unit (layer, embedding or head) at a time", "through the step"
        remarks = _in_cpu_memory(self.run.offload) | {
            "gathered_weights": unit if zero == 3 else step,
            "unreduced_gradients": step if pipelined or (zero < 2 and accumulates) else unit,
        }
        rows = [(kind.replace("_", " "), say_bytes(size), remarks.get(kind, "")) for kind, size in sizes.items()]
        return table_lines([("here", "size", ""), *rows])


def build_rank(run: Run, grid: Grid, placement: Sequence[int], notes: tuple[str, ...], rank: int) -> RankBuild:
    """What rank `rank` of a legal run on `grid` holds; `placement` says which pipeline rank has each stage.

    Raises UserError if the vocabulary is unknown, or if the model's family cannot be split so.
    """
    with pretended_rank(rank, grid.world):
        mesh = replace(mesh_of(run.parallel, CPU), device=META)
        built = build_stages(_in_no_memory(run), mesh, placement, pipelined=len(placement) > 1)
        stages = {stage: model for stage, (model, _) in built.items()}
        with without_memory():
            for model in stages.values():
                model.to_empty(device=CPU)
            parameters = sharded_parameters(stages, mesh)
            state = ShardedOptimizer(parameters, run.optim, list(parameters)).materialize()
            moments = _moments(state)
            held = [
                _held(name, p.parameter, p.shape, p.copies, moments.get(name, {}), run)
                for name, p in parameters.items()
            ]
            held += [copy for model in stages.values() for copy in _tied_copies(model, run)]
    layers = stage_layers(run)
    return RankBuild(run, grid, rank, {stage: layers[stage] for stage in sorted(stages)}, held, notes)


def _tied_copies(stage: nn.Module, run: Run) -> Iterator[HeldParameter]:
    """What a stage holds beside its parameters: a copy of the embedding that another stage owns, in its head."""
    whole = torch.Size((vocabulary(run.model), run.model.hidden))
    for name, module in stage.named_modules():
        if hasattr(module, TIED_COPY):
            weight = module.get_parameter("weight")
            copy = _held(f"{name}.weight", weight, whole, _replicas(weight), {}, run)
            yield replace(copy, copy_of=getattr(module, TIED_COPY))


def _replicas(parameter: nn.Parameter) -> int:
    """Ranks that hold the same shard of a parameter that tp cuts: those over which FSDP replicates it."""
    assert isinstance(parameter, DTensor), "FSDP has wrapped the stage"
    over = zip(parameter.device_mesh.shape, parameter.placements, strict=True)
    return prod(size for size, placement in over if placement.is_replicate())


def _in_cpu_memory(offload: Collection[str]) -> dict[str, str]:
    """Which of the sizes are of CPU memory."""
    there = "in CPU memory"
    if "parameters" in offload:
        return dict.fromkeys(("weights", "gradients", "moments"), there)
    return {"weights": "and a copy in CPU memory", "moments": there} if "optimizer" in offload else {}


def _in_no_memory(run: Run) -> Run:
    """The run with its parameters where the mesh says, which here is nowhere, and not in CPU memory."""
    return run.model_copy(update={"offload": [kept for kept in run.offload if kept != "parameters"]})


def _moments(state: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    """Bytes of the optimizer's state, by parameter and kind."""
    sizes: dict[str, dict[str, int]] = {}
    for key, value in state.items():
        kind, _, name = key.partition(".")
        sizes.setdefault(name, {})[kind] = _size(local_part(value))
    return sizes


def _held(
    name: str, parameter: nn.Parameter, shape: torch.Size, copies: int, moments: dict[str, int], run: Run
) -> HeldParameter:
    local, gathered = local_part(parameter.detach()), parameter.numel()
    return HeldParameter(
        name,
        shape=tuple(shape),
        local_shape=tuple(local.shape),
        dtype=next(word for word, dtype in DTYPES.items() if dtype == local.dtype),
        copies=copies,
        copy_of=None,
        weight=_size(local),
        gradient=_size(local),
        moments=moments,
        gathered_weight=gathered * DTYPES[run.precision.compute].itemsize,
        unreduced_gradient=gathered * reduce_dtype(run.precision).itemsize,
    )


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _say_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def say_bytes(number: int) -> str:
    """A size to three digits in binary units."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number} bytes"
