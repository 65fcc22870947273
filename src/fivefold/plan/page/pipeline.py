"""The pipeline's timeline with the times that the plan reckons with. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.run import Run
from fivefold.config.schedules import is_file
from fivefold.pipeline.draw import Panel
from fivefold.pipeline.draw_svg import comfortable_width, svg
from fivefold.pipeline.of_run import microbatches_of, schedule_of_run
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.times import Times
from fivefold.plan.forecast import Forecast

ACTIONS = 6000
"""At most so many are drawn, of fewer microbatches if the run has more."""


def pipeline_picture(found: Forecast) -> Iterator[str]:
    """The picture, and what is left out of it."""
    if found.schedule is None:
        yield "<p>There is a single stage, and no pipeline.</p>"
        return
    run = _drawable(found.run)
    shown, whole = microbatches_of(run), found.microbatches
    if shown < whole:
        yield f"<p>Drawn are {shown:,} of a step's {whole:,} microbatches; the others go the same way.</p>"
    yield "<p>Its bubble is that of the rank whose step is the longest; the figure above, of the busiest rank.</p>"
    schedule = found.schedule if shown == whole else schedule_of_run(run)
    forward, input, weight = zip(*found.step.stages, strict=True)
    timeline = simulate(schedule, Times(forward, input, weight, latency=found.step.hop))
    panels = [Panel(f"{schedule.name}, {shown:,} microbatches", timeline, "s")]
    yield f'<div class="wide pipeline">{svg(panels, comfortable_width(panels))}</div>'


def _drawable(run: Run) -> Run:
    """The run with so few microbatches that each has a box; a schedule from a file has the number that it has."""
    parallel, here = run.parallel, microbatches_of(run)
    most = max(2 * parallel.pp, ACTIONS // (3 * parallel.pp * parallel.chunks))
    if here <= most or is_file(parallel.schedule):
        return run
    assert parallel.dp != "auto", "the ranks are known"
    few = most // parallel.pp * parallel.pp + here % parallel.pp
    size = min(few, here) * run.batch.micro_size * parallel.dp
    return run.model_copy(update={"batch": run.batch.model_copy(update={"global_size": size})})
