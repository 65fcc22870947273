"""What each parameter of a spread model is as a whole: its global shape, and which piece of it this rank holds.

The modules hold what tp left of each parameter, FSDP cuts that over the data-parallel ranks, and neither knows of the
other. Here the two are put together: one DTensor a parameter, on the axes (tp, replicate, shard) of this rank's stages,
or for experts (ep, replicate, shard), over the same memory. First weights, checkpoints, the optimizer's state and the
gradient norm are all made from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fivefold._torch import dtensor_over
from fivefold.parallel.links import Links
from fivefold.parallel.mesh import Mesh

TIED_COPY = "tied_copy"
"""Attribute of a module whose `weight` is a copy of another stage's parameter: the name of that parameter."""


EXPERTS = "spread_over_ep"
"""Attribute of a module whose parameters are experts, which ep cuts and not tp."""


class Cut(NamedTuple):
    """How tp (or ep) cuts a parameter. A module names its cuts in the attribute `cuts`, by the parameter's name."""

    dimension: int
    size: int
    """Of the whole parameter in that dimension; the pieces are those of torch.chunk."""


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter, of which this rank holds a piece."""

    parameter: nn.Parameter
    """What FSDP manages; its `grad` is this rank's piece of the gradient."""
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    """Of the whole parameter."""
    copies: int
    """How many ranks hold the same piece."""
    partial: bool
    """Whether the gradient lacks a sum over tp: each of its ranks has used the whole parameter on tokens of its own."""
    stage: int
    """Of the pipeline, which has this parameter and no other stage has it."""

    @property
    def local(self) -> Tensor:
        """This rank's piece; writing into it changes the parameter."""
        return local_part(self.parameter.detach())

    @property
    def whole(self) -> DTensor:
        """The parameter by its global shape, over this rank's piece."""
        return self.like(self.local)

    def like(self, local: Tensor) -> DTensor:
        """`local`, which belongs to this rank's piece element by element, as a tensor of the global shape.

        It may be in CPU memory, as may the piece itself.
        """
        strides = torch.empty(self.shape, device="meta").stride()
        return dtensor_over(local, self.mesh, self.placements, self.shape, strides)


def sharded_parameters(stages: Mapping[int, nn.Module], mesh: Mesh) -> dict[str, ShardedParameter]:
    """Every parameter of this rank's stages by its name in the whole model, in the order of the stages.

    `shard_data_parallel` has wrapped each stage. A copy of a tied weight is no parameter of its own: see `tied.py`.
    """
    return {
        f"{prefix}.{name}" if prefix else name: _sharded(parameter, stage, module, name, mesh)
        for stage in sorted(stages)
        for prefix, module in stages[stage].named_modules()
        if not hasattr(module, TIED_COPY)
        for name, parameter in module.named_parameters(recurse=False)
    }


def names_of_all(parameters: Mapping[str, ShardedParameter], links: Links) -> list[str]:
    """The names of the whole model's parameters in the order of its stages, the same on every rank.

    `parameters` are those of this rank. A collective call.
    """
    mine = [(parameter.stage, name) for name, parameter in parameters.items()]
    return [name for _, name in sorted(chain.from_iterable(links.gather(mine)), key=itemgetter(0))]


def local_part(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor; another tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded(parameter: nn.Parameter, stage: int, module: nn.Module, name: str, mesh: Mesh) -> ShardedParameter:
    assert isinstance(parameter, DTensor), "FSDP has wrapped the model"
    cut: Cut | None = getattr(module, "cuts", {}).get(name)
    axes = mesh.experts if hasattr(module, EXPERTS) else mesh.dense
    over_data = parameter.placements if parameter.device_mesh.ndim == 2 else (Replicate(), *parameter.placements)
    over_first = Replicate() if cut is None else Shard(cut.dimension)
    shape = list(parameter.shape)
    if cut is not None:
        shape[cut.dimension] = cut.size
    return ShardedParameter(
        parameter,
        axes,
        (over_first, *over_data),
        torch.Size(shape),
        copies=axes["replicate"].size() * (mesh.tp.size if cut is None else 1),
        partial=cut is None and mesh.tp.size > 1,
        stage=stage,
    )
