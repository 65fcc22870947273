"""What a pipeline's schedule comes to before anything was measured: the bubble, and what each rank keeps.

A stage's forward, the gradient of its input and that of its weights then take one unit each (F = I = W), and transfers
nothing. Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fivefold.config.run import Run
from fivefold.config.schedules import is_file
from fivefold.pipeline.of_run import schedule_of_run
from fivefold.pipeline.schedule import Schedule
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.times import Times


def pipeline_schedule(run: Run) -> Schedule | None:
    """The schedule of a legal run whose ranks are known; None with a single stage, which needs none.

    Raises UserError if it cannot run.
    """
    stages = run.parallel.pp * run.parallel.chunks
    return None if stages == 1 and not is_file(run.parallel.schedule) else schedule_of_run(run)


@dataclass(frozen=True)
class Outlook:
    """A schedule in numbers."""

    name: str
    microbatches: int
    placement: tuple[int, ...]
    """Which pipeline rank has each stage."""
    bubble: float
    """Share of a step in which the rank that works longest is idle."""
    peak_activations: tuple[float, ...]
    """The most that each rank keeps at once, in activations of all its layers of one microbatch."""

    @classmethod
    def of(cls, schedule: Schedule) -> Outlook:
        """The numbers of a sound schedule."""
        timeline = simulate(schedule, Times.uniform(schedule.stages, forward=1.0, input=1.0, weight=1.0))
        return cls(schedule.name, schedule.microbatches, schedule.placement, timeline.bubble, timeline.peak)

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.peak_activations)

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a pipeline rank has."""
        return [stage for stage, holder in enumerate(self.placement) if holder == rank]

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    def line(self) -> str:
        """All of it in one line, with the peak of the rank that keeps most."""
        return (
            f"{self.name}: {_count(len(self.placement), 'stage')} on {_count(self.ranks, 'rank')}, "
            f"{_count(self.microbatches, 'microbatch', 'es')} a step, at most {max(self.peak_activations):.3g} kept, "
            f"bubble {self.bubble:.3f} (F = I = W)"
        )


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{'' if number == 1 else plural}"
