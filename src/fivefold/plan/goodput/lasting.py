"""How long a run lasts and what it costs when machines fail and it saves as its run file says. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from math import isinf

from fivefold.config.run import Run
from fivefold.plan.cluster import Cluster
from fivefold.plan.cost import Cost, cost_of
from fivefold.plan.goodput.failures import NODE_GPUS, REPAIR, Failures, Spares, spares_for
from fivefold.plan.goodput.formulas import LEAST, THREE_TIERS, Goodput, Tier, goodput
from fivefold.plan.quantities import formula, percent, time
from fivefold.plan.storage import saved, tier_of

LOAD = THREE_TIERS[-1].load
"""Seconds at least to read a checkpoint from storage that all nodes share; assumed."""
USUAL = 1800.0
"""Seconds between checkpoints that a run is advised to take, 30min."""
SWAPPED = 0.25
"""Share of the failures after which the node is replaced; a restart on the same host cures the others."""


def own_tier(run: Run, cluster: Cluster, step_seconds: float) -> Tier:
    """The run's own checkpoints, on storage that all nodes share.

    One that saves nothing before its end has its whole length as the interval, however that is written.
    """
    busy = run.total_steps * step_seconds
    if saved(run) != "on the way":
        return Tier("checkpoint", busy, 0.0, LOAD, 1.0)
    tier = tier_of(run, cluster, step_seconds)
    interval = min(tier.interval, busy)
    return replace(tier, interval=interval, load=max(tier.load, LOAD), stall=min(tier.stall, interval))


def goodput_of(run: Run, cluster: Cluster, step_seconds: float, failures: Failures) -> Goodput:
    """What failures leave of the time, with the run's own checkpoints."""
    return goodput(failures, cluster.gpus, [own_tier(run, cluster, step_seconds)])


def lasting_cost(run: Run, cluster: Cluster, step_seconds: float, failures: Failures) -> Cost:
    """What the run costs with its failures, and with the spares that stand ready for them."""
    job = goodput_of(run, cluster, step_seconds, failures)
    return cost_of(run, cluster, step_seconds, goodput=job, spare_gpus=spare_gpus(failures, cluster.gpus))


def spare_gpus(failures: Failures, gpus: int) -> int:
    """GPUs that stand ready and are paid for; none where nothing fails, or hardly ever."""
    return 0 if isinf(failures.mttf(gpus)) else _spares(failures, gpus).gpus


def _spares(failures: Failures, gpus: int) -> Spares:
    """Without a rack, as the formulas know of no losses of racks."""
    return spares_for(failures, gpus, REPAIR, rack_nodes=0, swapped=SWAPPED)


def explain_spares(failures: Failures, gpus: int) -> str:
    """The formula of `spare_gpus` with its numbers."""
    if isinf(failures.mttf(gpus)):
        return "spare GPUs = 0: nothing fails"
    spares = _spares(failures, gpus)
    return formula(
        "spare GPUs",
        f"{NODE_GPUS} x nodes in repair, P{100 * spares.quantile:g} of Poisson({spares.in_repair:.3g})",
        f"{NODE_GPUS} x {spares.most_in_repair}",
        f"{spares.gpus:,}",
    )


def says_failures(run: Run, cost: Cost) -> list[str]:
    """What is taken to be so of failures, in sentences; first that the run would not end, if so."""
    job = cost.goodput
    if job is None or isinf(job.mttf):
        return ["nothing fails"]
    return [
        *([] if job.ends else [f"the run would not end: {says_endless(run, cost)}; {_mended(job)}"]),
        f"machines fail as those of {job.failures.name} ({job.failures.source}); spare GPUs that stand ready "
        f"for nodes in repair ({time(REPAIR)} each, after {percent(SWAPPED)} of the failures) and are paid for: "
        f"{cost.spare_gpus:,}",
        f"a failure costs {_lost(run, cost)} and {time(job.detect + job.tiers[0].load)} to detect, restart and load",
    ]


def says_endless(run: Run, cost: Cost) -> str:
    """Why a run does not end, with the numbers."""
    assert cost.goodput is not None, "without failures every run ends"
    return (
        f"a failure strikes every {time(cost.goodput.mttf)} and costs {_lost(run, cost)}, which leaves less than "
        f"{percent(LEAST)} of the time"
    )


def _lost(run: Run, cost: Cost) -> str:
    """The work that a failure costs."""
    assert cost.goodput is not None, "without failures nothing is lost"
    interval, busy = cost.goodput.tiers[0].interval, cost.steps * cost.step_seconds
    if interval < busy:
        return f"the work since the last checkpoint (every {time(interval)})"
    every = run.checkpoint.every or "null"
    return f"all work since the start (checkpoint.every = {every} saves none of the {time(busy)} before their end)"


def _mended(job: Goodput) -> str:
    """What to do about a job that does not end."""
    tier = job.tiers[0]
    usual = replace(tier, interval=USUAL, stall=min(tier.stall, USUAL))
    if goodput(job.failures, job.gpus, [usual], job.detect).ends:
        return "give checkpoint.every 30min"
    return "machines that fail so often want fewer GPUs, for no checkpoint.every mends it"
