"""One attention over several ranks: what each computes, and what one process computes by the formula."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold.kernels.alibi import alibi_slopes
from fivefold.parallel.axis import ALONE, Axis
from fivefold.parallel.context import Method, attend_across, plan_attention, positions
from tests.kernels.formula import documents, formula

DOCUMENTS = (
    (5, 1, 1, 9, 16),  # short ones, and ends inside a chunk and on its edge
    (32,),
    (1, 30, 1),
    (8, 8, 4, 4, 8),  # all ends on edges: whole blocks of keys are seen by nobody
    (31, 1),
)
NAMES = ("out", "dq", "dk", "dv")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Attention over rows that are packed from documents, or are one document each."""

    method: Method
    packed: bool = False
    alibi: bool = False
    heads: int = 12
    kv_heads: int = 4
    head_size: int = 5
    lengths: tuple[tuple[int, ...], ...] = DOCUMENTS
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @property
    def seq_len(self) -> int:
        """Of every row."""
        return sum(self.lengths[0])

    @property
    def documents(self) -> Tensor | None:
        """The rows' documents, (b, S), if they are packed."""
        return documents(self.lengths).to(self.device) if self.packed else None

    @property
    def slopes(self) -> list[float] | None:
        """ALiBi's, if the scores have it."""
        return alibi_slopes(self.heads) if self.alibi else None

    def inputs(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, whole, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        return [
            torch.randn(len(self.lengths), self.seq_len, n, self.head_size, dtype=torch.float64, generator=generator)
            .to(self.dtype)
            .to(self.device)
            for n in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]

    def part(self, axis: Axis) -> list[Tensor]:
        """The inputs at the positions of a rank."""
        mine = positions(self.seq_len, axis, self.method).to(self.device)
        return [x[:, mine] for x in self.inputs()]


def cp_axis() -> Axis:
    """All ranks of the crew."""
    return Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def on_a_rank(case: Case, recompute: bool = False) -> tuple[Tensor, Tensors]:
    """This rank's positions, and its part of the output and of the gradients."""
    axis = cp_axis()
    *qkv, dout = case.part(axis)
    leaves = [x.requires_grad_() for x in qkv]
    plan = plan_attention(axis, case.method, case.seq_len, leaves[0], case.documents, case.slopes)
    if recompute:
        out = checkpoint(attend_across, *leaves, plan, use_reentrant=False)
    else:
        out = attend_across(*leaves, plan)
    gradients = torch.autograd.grad(out, leaves, dout)
    return positions(case.seq_len, axis, case.method), named(out.detach(), *gradients)


def saved_bytes(case: Case) -> int:
    """What a rank keeps of an attention for its backward."""
    axis = cp_axis() if dist.is_initialized() else ALONE
    leaves = [x.requires_grad_() for x in case.part(axis)[:3]]
    plan = plan_attention(axis, case.method, case.seq_len, leaves[0], case.documents, case.slopes)
    with counted() as sizes:
        attend_across(*leaves, plan)
    return sum(sizes)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of each tensor that is saved inside."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def joined(parts: list[tuple[Tensor, Tensors]]) -> Tensors:
    """Whole tensors from what the ranks gave; every position is held once."""
    held = torch.cat([mine for mine, _ in parts])
    assert torch.equal(held.sort().values, torch.arange(len(held)))
    return {name: torch.cat([part[name] for _, part in parts], 1)[:, held.argsort()] for name in NAMES}


def by_the_formula(case: Case) -> Tensors:
    """The same in one process, in float64, from inputs rounded to the case's format."""
    *qkv, dout = (x.double() for x in case.inputs())
    leaves = [x.requires_grad_() for x in qkv]
    out = formula(*leaves, case.documents, case.slopes)
    return named(out.detach(), *torch.autograd.grad(out, leaves, dout))


def named(*tensors: Tensor) -> Tensors:
    """Output and gradients by name."""
    return dict(zip(NAMES, tensors, strict=True))


def errors(got: Tensors, expected: Tensors) -> dict[str, float]:
    """Relative error of each tensor, by norm."""
    return {name: float((got[name] - expected[name]).norm() / expected[name].norm()) for name in NAMES}
