"""The same run on fewer and on more accelerators: dp a quarter to four times, the batch as it is.

With more replicas each has fewer microbatches, so that pipelines and reductions weigh more. Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from fivefold.config.rules import LEGALITY, check
from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.plan.cluster import cluster_of
from fivefold.plan.execution import OURS, Execution
from fivefold.plan.goodput.failures import Failures
from fivefold.plan.goodput.lasting import lasting_cost, says_endless
from fivefold.plan.memory.fits import memory_if_it_fits

FACTORS = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4))
"""Of dp."""


@dataclass(frozen=True)
class Point:
    """The run on so many accelerators. The numbers are None where it cannot be, and `why` says why.

    Of a run that would not end only the days and what they cost are None.
    """

    gpus: int
    dp: int
    step_seconds: float | None = None
    calendar_days: float | None = None
    spare_gpus: int | None = None
    paid_gpu_hours: float | None = None
    """Of all that time, spares included."""
    tokens_per_s: float | None = None
    efficiency: float | None = None
    """Tokens a second and accelerator, relative to the run as it is."""
    fits: bool | None = None
    why: str | None = None

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)


def scaling(run: Run, failures: Failures, here: float, execution: Execution = OURS) -> tuple[Point, ...]:
    """The run at each of `FACTORS`, as far as dp stays a whole number.

    `here` is what it makes as it is, in tokens a second and accelerator.
    """
    dp = run.parallel.dp
    assert dp != "auto", "the ranks are known"
    assert run.cluster.gpus != "auto", "the ranks are known"
    return tuple(
        _point(run, int(dp * factor), int(run.cluster.gpus * factor), failures, here, execution)
        for factor in FACTORS
        if (dp * factor).denominator == 1
    )


def _point(run: Run, dp: int, gpus: int, failures: Failures, here: float, execution: Execution) -> Point:
    changed = run.model_copy(
        update={
            "parallel": run.parallel.model_copy(update={"dp": dp}),
            "cluster": run.cluster.model_copy(update={"gpus": gpus}),
        }
    )
    if broken := check(changed, gpus, LEGALITY):
        return Point(gpus, dp, why=broken[0])
    try:
        cluster = cluster_of(changed)
        step = execution.step_time(changed, cluster)
        fits = memory_if_it_fits(changed, cluster, execution) is not None
    except UserError as error:
        return Point(gpus, dp, why=str(error))
    cost = lasting_cost(changed, cluster, step.seconds, failures)
    days = cost.calendar_days
    return Point(
        gpus,
        dp,
        step_seconds=step.seconds,
        calendar_days=days,
        spare_gpus=cost.spare_gpus,
        paid_gpu_hours=cost.paid_gpu_hours,
        tokens_per_s=step.tokens_per_s,
        efficiency=step.tokens_per_s / gpus / here,
        fits=fits,
        why=f"would not end: {says_endless(changed, cost)}" if days is None else None,
    )
