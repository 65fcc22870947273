"""Measuring a pipeline while it trains: now and then the times of one step's actions, as `pipeline.json`.

The record is drawn beside the simulated timeline and can be fed back as the times of a new schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fivefold.data.loader import Step
from fivefold.parallel.mesh import Mesh
from fivefold.pipeline.execute import Pipeline
from fivefold.pipeline.measured import PIPELINE_FILE, Measured
from fivefold.pipeline.text import to_csv

FIRST = 3
"""The first step that is measured: what happens once is over by then. Each further one has ten times its number."""


def is_measured(step: int) -> bool:
    """Whether the actions of a step are measured: steps 3, 30, 300 and so on."""
    while step > FIRST and step % 10 == 0:
        step //= 10
    return step == FIRST


@contextmanager
def watched(pipeline: Pipeline, batch: Step, step: int, mesh: Mesh, folder: Path) -> Iterator[None]:
    """Train on `batch` inside. If `step` is one that is measured, the run's folder then holds its record."""
    if mesh.grid.pp == 1 or not is_measured(step):
        yield
        return
    longest = max(batch.microbatches, key=lambda inputs: inputs.tokens.numel())
    transfer = pipeline.transfer_seconds(longest)
    with pipeline.clock.recording() as spans:
        yield
    by_rank = mesh.pp.gather(list(spans))
    if mesh.is_main:
        schedule = pipeline.schedule
        record = Measured(to_csv(schedule), schedule.name, step, by_rank, transfer, longest.tokens.numel())
        record.save(folder / PIPELINE_FILE)
