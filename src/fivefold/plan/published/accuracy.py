"""How far the planner is off on the published runs that ship with it, as error bars of what it predicts.

A validation takes many times longer than a plan, so its totals stand here as numbers; a test compares them with a fresh
validation. Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fivefold.config.run import Run
from fivefold.hardware.accelerator import Accelerator
from fivefold.plan.constants import FITTED_FAMILIES


@dataclass(frozen=True)
class Bar:
    """Absolute errors of a prediction, relative to what was measured, as fractions."""

    mean: float
    p90: float
    """Nine of ten rows are nearer than this."""
    rows: int
    of: str
    """Which rows."""

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)


STEP_TIME = Bar(0.045, 0.096, 242, "step time of published dense runs")
STEP_TIME_MOE = Bar(0.197, 0.383, 29, "step time of published runs with experts")
MEMORY = Bar(0.036, 0.068, 81, "peak memory of published dense runs")


def of_step_time(run: Run, accelerator: Accelerator) -> Bar | None:
    """The error bar of a run's step time; None on accelerators of which no published run is known."""
    if accelerator.family not in FITTED_FAMILIES:
        return None
    return STEP_TIME if run.model.moe is None else STEP_TIME_MOE


def of_memory(run: Run) -> Bar | None:
    """The error bar of a run's memory; None with experts, whose memory no published run bounds."""
    return MEMORY if run.model.moe is None else None
