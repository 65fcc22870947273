"""How long a run lasts when machines fail and it saves as its run file says. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from fivefold.config.run import Run
from fivefold.plan.cluster import Cluster
from fivefold.plan.cost import cost_of
from fivefold.plan.goodput.failures import Failures
from fivefold.plan.goodput.formulas import THREE_TIERS, Goodput, Tier, goodput
from fivefold.plan.storage import saved, tier_of

LOAD = THREE_TIERS[-1].load
"""Seconds at least to read a checkpoint from storage that all nodes share; assumed."""


def own_tier(run: Run, cluster: Cluster, step_seconds: float) -> Tier:
    """The run's own checkpoints, on storage that all nodes share. Raises UserError if it saves at its end only."""
    tier = tier_of(run, cluster, step_seconds)
    return replace(tier, load=max(tier.load, LOAD), stall=min(tier.stall, tier.interval))


def goodput_of(run: Run, cluster: Cluster, step_seconds: float, failures: Failures) -> Goodput | None:
    """What failures leave of the time, with the run's own checkpoints; None if it would never get on."""
    if saved(run) != "on the way":
        return None
    job = goodput(failures, cluster.gpus, [own_tier(run, cluster, step_seconds)])
    return job if job.ettr > 0 else None


def calendar_days(run: Run, cluster: Cluster, step_seconds: float, failures: Failures) -> float:
    """Days from the first step to the last; of a run that would never get on those without failures."""
    job = goodput_of(run, cluster, step_seconds, failures)
    return cost_of(run, cluster, step_seconds, goodput=job).calendar_days
