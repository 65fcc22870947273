"""A small model in pipeline stages, in any layout: five layers of awkward sizes, and a head that may be tied.

Values are a function of a name and a number, so every layout can be filled alike and compared with the whole.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold._torch import local_offsets
from fivefold.config.run import Parallel, Precision
from fivefold.parallel.axis import Axis
from fivefold.parallel.mesh import Mesh, mesh_of
from fivefold.parallel.state import TIED_COPY, ShardedParameter
from fivefold.parallel.tensor import ColumnLinear, Embedding, RowLinear
from fivefold.parallel.zero import master_dtype, shard_data_parallel
from fivefold.pipeline.schedule import looped, v_shaped
from tests.ranks import kept

VOCABULARY, WIDTH, LAYERS = 13, 6, 5


@dataclass(frozen=True)
class Layout:
    """Degrees, and where the stages are."""

    pp: int = 1
    chunks: int = 1
    dp: int = 1
    tp: int = 1
    replicate: int = 1
    zero: int = 1
    folded: bool = False
    """Whether two chunks go down the ranks and up again."""

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def placement(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return v_shaped(self.pp) if self.folded else looped(self.pp, self.chunks)

    @property
    def mesh(self) -> Mesh:
        """On the processes of now; kept for the group's life."""
        key = ("mesh", self.pp, self.tp, self.replicate, self.zero == 0)
        if key not in kept:
            parallel = Parallel(pp=self.pp, tp=self.tp, replicate=self.replicate, zero=self.zero)  # type: ignore[arg-type]
            kept[key] = mesh_of(parallel, torch.device("cpu"))
        return kept[key]


class Stage(nn.Module):
    """Consecutive layers, with the embedding before the first and the head after the last."""

    def __init__(self, layers: range, first: bool, last: bool, tp: Axis) -> None:
        super().__init__()
        if first:
            self.embedding = Embedding(VOCABULARY, WIDTH, tp)
        self.layers = nn.ModuleDict({str(number): Layer(tp) for number in layers})
        if last:
            self.norm = nn.LayerNorm(WIDTH)
            self.head = nn.Module() if first else Head(tp)


class Layer(nn.Module):
    """Weights that tp cuts by rows and by columns, and a bias that it does not cut."""

    def __init__(self, tp: Axis) -> None:
        super().__init__()
        self.up = ColumnLinear(WIDTH, 10, True, tp)
        self.down = RowLinear(10, WIDTH, True, tp)


class Head(nn.Module):
    """A copy of the embedding."""

    def __init__(self, tp: Axis) -> None:
        super().__init__()
        column = ColumnLinear(WIDTH, VOCABULARY, False, tp)
        self.weight, self.cuts = column.weight, column.cuts
        setattr(self, TIED_COPY, "embedding.weight")


def stages_of(layout: Layout, compute: str = "fp32", offload: bool = False) -> dict[int, nn.Module]:
    """This rank's, wrapped, every element -7."""
    precision = Precision(compute=compute, master="bf16" if compute == "bf16" else "auto")  # type: ignore[arg-type]
    cuts = [LAYERS * stage // len(layout.placement) for stage in range(len(layout.placement) + 1)]
    stages: dict[int, nn.Module] = {}
    for number, (first, end) in enumerate(pairwise(cuts)):
        if layout.placement[number] == layout.mesh.pp.rank:
            stage = Stage(range(first, end), number == 0, end == LAYERS, layout.mesh.tp).to(master_dtype(precision))
            shard_data_parallel(stage, layout.mesh, layout.zero, precision, offload)
            stages[number] = stage
            with torch.no_grad():
                for parameter in stage.parameters():
                    parameter.fill_(-7.0)
    return stages


def whole(name: str, shape: tuple[int, ...], number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of a tensor of the whole model; `number` tells occasions apart."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{number}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


Box = tuple[slice, ...]
"""Where a piece lies in the whole."""


def box_of(tensor: DTensor) -> Box:
    """That of this rank's piece."""
    sizes = zip(local_offsets(tensor), tensor.to_local().shape, strict=True)
    return tuple(slice(first, first + size) for first, size in sizes)


@torch.no_grad()
def fill(parameter: ShardedParameter, values: Tensor) -> None:
    """Write this rank's piece of `values` into a parameter."""
    parameter.local.copy_(values[box_of(parameter.whole)])


@torch.no_grad()
def fill_gradient(parameter: ShardedParameter, values: Tensor) -> None:
    """Give a parameter its piece of a gradient."""
    assert isinstance(parameter.parameter, DTensor)
    parameter.parameter.grad = torch.zeros_like(parameter.parameter)
    parameter.parameter.grad.to_local().copy_(values[box_of(parameter.whole)])
