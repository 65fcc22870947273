"""What a GPU's memory shows beside the tensors: the allocator's gaps, the context, communicators. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.config.run import Run
from fivefold.plan.software import Software

GIB = 2**30

GAPS = 1.10
"""Reserved over allocated of the caching allocator with blocks of fixed size; fitted, with what DeepSpeed holds beside
its formula (`software.STATES`), on nvidia-smi's figures of 2022. The other three are assumed."""
EXPANDABLE = 1.04
"""The same with expandable segments, which our own runs ask for."""
CONTEXT = 0.7 * GIB
"""CUDA's context, kernels and cuBLAS' workspaces."""
COMMUNICATOR = 0.4 * GIB
"""NCCL's buffers of the groups along one axis, or of all ranks."""


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
    expandable = software.name == "fivefold"
    return Overhead(
        EXPANDABLE if expandable else GAPS,
        CONTEXT + COMMUNICATOR * (len(groups) + bool(groups)),
        "the allocator's gaps" + (" with expandable segments" if expandable else ""),
        f"the context and the communicators of {', '.join(groups) or 'no group'}",
    )
