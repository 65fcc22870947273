"""A small state with every awkward shape, in any layout; its values are a function of the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from fivefold.checkpoint.find import Found
from fivefold.checkpoint.load import read_full
from tests.checkpoint.crew import Team

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model.embedding": ((13, 6), torch.float32),  # an odd vocabulary, hidden 6
    "model.six_rows": ((6, 5), torch.float32),  # 2, 2, 2, 0 on four ranks
    "model.three": ((3,), torch.float32),  # 1, 1, 1, 0 on four ranks
    "model.cube": ((5, 7, 3), torch.float64),
    "model.bf16": ((7, 3), torch.bfloat16),
    "model.fp8": ((4, 9), torch.float8_e4m3fn),
    "model.empty": ((0, 4), torch.float32),
    "model.scalar": ((), torch.float32),
    "optim.exp_avg.embedding": ((13, 6), torch.float32),
    "optim.exp_avg_sq.six_rows": ((6, 5), torch.float32),
    "optim.step.embedding": ((), torch.int64),
    "optim.flag": ((5,), torch.bool),
}

LAYOUTS: dict[str, tuple[int, str, tuple[Placement, ...]]] = {
    "dp1": (1, "dp1", (Shard(0),)),
    "dp2": (2, "dp2", (Shard(0),)),
    "dp3": (3, "dp3", (Shard(0),)),
    "dp4": (4, "dp4", (Shard(0),)),
    "columns": (4, "dp4", (Shard(1),)),
    "replicate2 x dp2": (4, "2x2", (Replicate(), Shard(0))),
    "rows x columns": (4, "2x2", (Shard(0), Shard(1))),
    "rows x rows": (4, "2x2", (Shard(0), Shard(0))),
    "all replicated": (3, "dp3", (Replicate(),)),
}


def ranks_of(layout: str) -> int:
    return LAYOUTS[layout][0]


FEW = ("model.embedding", "model.scalar", "model.bf16")


def whole(step: int, names: Iterable[str] = SHAPES) -> dict[str, Tensor]:
    """The global tensors after `step` steps: random bytes, so NaN and infinities of every kind are among them."""
    return {name: _random(*SHAPES[name], seed=1000 * step + list(SHAPES).index(name)) for name in names}


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def sharded(team: Team, layout: str, step: int) -> dict[str, Tensor | DTensor]:
    """The same tensors in a layout; scalars, and what has too few dimensions for it, stay plain."""
    _, mesh, placements = LAYOUTS[layout]
    dimensions = 1 + max([p.dim for p in placements if isinstance(p, Shard)], default=0)
    return {
        name: distribute_tensor(tensor, team.meshes[mesh], placements, src_data_rank=None)
        if tensor.ndim >= dimensions
        else tensor
        for name, tensor in whole(step).items()
    }


def blank(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the same layouts, all zeros."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def content(tensor: Tensor) -> bytes:
    """This rank's elements as bytes: equal bytes, not equal numbers."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert tensors.keys() == wanted.keys()
    for name, tensor in tensors.items():
        assert content(tensor) == content(wanted[name]), f"{name} differs"


def assert_holds(found: Found, step: int, names: Iterable[str] = SHAPES) -> None:
    """The checkpoint's global tensors and state are those of a step, byte for byte."""
    assert found.step == step
    assert found.state == {"step": step}
    tensors = dict(read_full(found))
    for name, tensor in tensors.items():
        assert (tensor.shape, tensor.dtype) == (torch.Size(SHAPES[name][0]), SHAPES[name][1])
    assert_same(tensors, whole(step, sorted(names)))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Events(list):
    """A listener that keeps what it is told."""

    def __call__(self, kind: str, fields: dict) -> None:
        self.append((kind, fields))

    def of(self, kind: str) -> list[dict]:
        return [fields for known, fields in self if known == kind]
