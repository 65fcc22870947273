"""Whether a run fits, answered at once where a bound from below already says that it does not. Imports no torch."""

from __future__ import annotations

from fivefold.config.run import Run
from fivefold.plan.cluster import Cluster
from fivefold.plan.execution import Execution
from fivefold.plan.memory.peak import Memory
from fivefold.plan.search.bounds import LeastMemory
from fivefold.plan.search.space import SCHEDULES, Degrees


def memory_if_it_fits(run: Run, cluster: Cluster, execution: Execution) -> Memory | None:
    """The memory of a legal run whose ranks are known; None if it does not fit.

    Raises UserError as `execution.memory`.
    """
    if _least(run, execution) > cluster.accelerator.memory:
        return None
    found = execution.memory(run, cluster)
    return found if found.fits else None


def _least(run: Run, execution: Execution) -> float:
    """Bytes that the fullest rank needs at least; 0 for what a search does not try, of which no bound is known."""
    parallel, recompute = run.parallel, run.recompute
    assert parallel.dp != "auto", "the ranks are known"
    searched = (
        parallel.schedule in ("1f1b", *SCHEDULES),
        parallel.layers_per_stage == "auto",
        parallel.replicate == 1,
        recompute.every == 1,
        not run.offload,
        execution.residual is None,
    )
    if not all(searched):
        return 0.0
    layout = Degrees(
        parallel.tp,
        parallel.cp,
        parallel.pp,
        parallel.ep,
        parallel.dp,
        run.batch.micro_size,
        parallel.zero,
        recompute.mode,
    )
    return LeastMemory(run).under(layout, execution.software(parallel), parallel.schedule, parallel.chunks)
