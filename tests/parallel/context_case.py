"""One attention over several ranks: what each computes, and what one process computes by the formula."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.kernels.alibi import alibi_slopes
from fivefold.parallel.axis import Axis
from fivefold.parallel.context import Method, attend_across, plan_attention, positions
from tests.kernels.formula import documents, formula

SEQ_LEN = 32
DOCUMENTS = [
    [5, 1, 1, 9, 16],  # short ones, and an end inside a chunk and on its edge
    [32],
    [1, 30, 1],
    [8, 8, 4, 4, 8],  # all ends on edges: whole blocks of keys are seen by nobody
    [31, 1],
]
HEADS, HEAD_SIZE = 12, 5
NAMES = ("out", "dq", "dk", "dv")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """Rows of SEQ_LEN tokens, one for each line of DOCUMENTS."""

    method: Method
    packed: bool = False
    alibi: bool = False
    kv_heads: int = 4
    dtype: torch.dtype = torch.float64

    @property
    def documents_bS(self) -> Tensor | None:  # noqa: N802
        """The rows' documents, if they are packed."""
        return documents(DOCUMENTS) if self.packed else None

    @property
    def slopes(self) -> list[float] | None:
        """ALiBi's, if the scores have it."""
        return alibi_slopes(HEADS) if self.alibi else None

    def inputs(self) -> list[Tensor]:
        """q, k, v and the gradient of the output, whole, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        sizes = (HEADS, self.kv_heads, self.kv_heads, HEADS)
        wide = [
            torch.randn(len(DOCUMENTS), SEQ_LEN, n, HEAD_SIZE, dtype=torch.float64, generator=generator) for n in sizes
        ]
        return [x.to(self.dtype) for x in wide]


def cp_axis() -> Axis:
    """All ranks of the crew."""
    return Axis(dist.get_world_size(), dist.get_rank(), dist.group.WORLD)


def on_a_rank(case: Case) -> tuple[Tensor, Tensors]:
    """This rank's positions, and its part of the output and of the gradients."""
    axis = cp_axis()
    mine = positions(SEQ_LEN, axis, case.method)
    *qkv, dout = (x[:, mine] for x in case.inputs())
    leaves = [x.requires_grad_() for x in qkv]
    plan = plan_attention(axis, case.method, SEQ_LEN, leaves[0].flatten(2), case.documents_bS, case.slopes)
    out = attend_across(*leaves, plan)
    gradients = torch.autograd.grad(out, leaves, dout)
    return mine, dict(zip(NAMES, (out.detach(), *gradients), strict=True))


def joined(parts: list[tuple[Tensor, Tensors]]) -> Tensors:
    """Whole tensors from what the ranks gave; every position is held once."""
    order = torch.cat([mine for mine, _ in parts]).argsort()
    assert torch.equal(torch.cat([mine for mine, _ in parts])[order], torch.arange(SEQ_LEN))
    return {name: torch.cat([part[name] for _, part in parts], 1)[:, order] for name in NAMES}


def by_the_formula(case: Case) -> Tensors:
    """The same in one process, in float64, from inputs rounded to the case's format."""
    *qkv, dout = (x.double() for x in case.inputs())
    leaves = [x.requires_grad_() for x in qkv]
    out = formula(*leaves, case.documents_bS, case.slopes)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, leaves, dout)), strict=True))


def errors(got: Tensors, expected: Tensors) -> dict[str, float]:
    """Relative error of each tensor, by norm."""
    return {name: float((got[name] - expected[name]).norm() / expected[name].norm()) for name in NAMES}


def with_kv_heads(case: Case, kv_heads: int) -> Case:
    """The case with another number of key/value heads."""
    return replace(case, kv_heads=kv_heads)
