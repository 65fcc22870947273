"""What a GPU's memory shows beside the tensors: the allocator's gaps, the context, communicators. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.config.run import Run
from fivefold.plan.constants import constants
from fivefold.plan.software import Software

GIB = 2**30

EXPANDABLE = 1.04
"""Reserved over allocated of an allocator whose segments can grow; assumed. That of one whose segments cannot is fitted
(`constants.py`)."""
ASK_FOR_IT = ("fivefold", "fsdp2")
"""Stacks that ask for such segments: ours, and torchtitan, whose script sets PYTORCH_CUDA_ALLOC_CONF."""
CONTEXT = 0.7 * GIB
"""CUDA's context, kernels and cuBLAS' workspaces; assumed."""
COMMUNICATOR = 0.4 * GIB
"""NCCL's buffers of the groups along one axis, or of all ranks; assumed."""


@dataclass(frozen=True)
class Overhead:
    """Beside the tensors."""

    reserved: float
    """Reserved over allocated."""
    context: float
    """Bytes that the allocator does not know of."""
    why_reserved: str
    why_context: str


def overhead_of(run: Run, software: Software) -> Overhead:
    """Of a run by a stack."""
    parallel = run.parallel
    axes = {"tp": parallel.tp, "pp": parallel.pp, "cp": parallel.cp, "ep": parallel.ep, "dp": parallel.dp}
    groups = [axis for axis, degree in axes.items() if degree != "auto" and degree > 1]
    expandable = software.name in ASK_FOR_IT
    return Overhead(
        EXPANDABLE if expandable else constants().gaps,
        CONTEXT + COMMUNICATOR * (len(groups) + bool(groups)),
        "the allocator's gaps" + (" with expandable segments" if expandable else ""),
        f"the context and the communicators of {', '.join(groups) or 'no group'}",
    )
