"""Rules on the pipeline's schedule: that there is such a one, and that it gets the chunks and microbatches it needs.

What a schedule demands is in `schedules.py`. Whether the actions of a CSV file are sound, and fit the ranks and the
microbatches, is asked where the schedule is made (`pipeline/of_run.py`), since this room knows no actions.
"""

from __future__ import annotations

from pathlib import Path

from fivefold import plugins
from fivefold.config.layout_rules import microbatches
from fivefold.config.rule import Rule, choices, divisors_of
from fivefold.config.run import Run
from fivefold.config.schedules import SCHEDULES, Demands, demands_of, is_file, schedule_names
from fivefold.errors import UserError

MICROBATCHES = ("parallel.dp", "batch.global_size", "batch.micro_size")
"""The keys that `microbatches` reads."""


def _schedule_fault(run: Run) -> str | None:
    """What is wrong with `parallel.schedule` by itself, if anything is."""
    schedule = run.parallel.schedule
    if schedule in SCHEDULES:
        return None
    if is_file(schedule):
        return None if Path(schedule).is_file() else f"there is no such file; {_say_names(schedule)}"
    if schedule not in schedule_names():
        return _say_names(schedule)
    try:
        found = demands_of(schedule)
    except UserError as error:
        return str(error)
    if not isinstance(found, Demands):
        kind = type(found).__name__
        return (
            f"what is registered under fivefold.schedules is a {kind}, and should be a `fivefold.pipeline.named.Named`"
        )
    return None


def _say_names(schedule: str) -> str:
    return plugins.say_known("schedules", schedule, schedule_names(), also=", or a CSV file")


def _demands(run: Run) -> Demands | None:
    """What the run's schedule demands; None if a file holds it."""
    return None if is_file(run.parallel.schedule) else demands_of(run.parallel.schedule)


def _chunks_misfit(run: Run) -> bool:
    demands = _demands(run)
    return demands is not None and demands.chunks not in (None, run.parallel.chunks)


def _say_chunks(run: Run) -> str:
    parallel, wanted = run.parallel, demands_of(run.parallel.schedule).chunks
    assert wanted is not None, "broken only if there is one number"
    other_chunks = f"parallel.chunks {wanted}, or " if parallel.pp * wanted <= run.model.layers else ""
    chunks = f"{wanted} model chunk{'' if wanted == 1 else 's'} a rank"
    return (
        f"parallel.schedule = {parallel.schedule} has {chunks}, but parallel.chunks = {parallel.chunks}; "
        f"use {other_chunks}parallel.schedule {choices(_fitting_names(run))}"
    )


def _fitting_names(run: Run) -> list[str]:
    """The schedules that take the run's chunks, and its microbatches as far as they are known."""
    return [name for name in schedule_names() if _fits(run, name)]


def _fits(run: Run, name: str) -> bool:
    try:
        demands = demands_of(name)
    except UserError:
        return False
    count = microbatches(run)
    return (
        isinstance(demands, Demands)
        and demands.chunks in (None, run.parallel.chunks)
        and (count is None or count >= demands.fewest(run.parallel.pp))
    )


def _too_few_microbatches(run: Run) -> bool:
    """False while the batch does not divide: another rule says that."""
    demands, count = _demands(run), microbatches(run)
    return demands is not None and count is not None and count < demands.fewest(run.parallel.pp)


def _say_microbatches(run: Run) -> str:
    size, micro, dp = run.batch.global_size, run.batch.micro_size, run.parallel.dp
    replicas = 1 if dp == "auto" else dp
    fewest = demands_of(run.parallel.schedule).fewest(run.parallel.pp)
    smaller = [m for m in divisors_of(size // replicas) if size // (replicas * m) >= fewest]
    other_micro = f", or batch.micro_size {choices(smaller)}" if smaller else ""
    names = _fitting_names(run)
    other_schedule = f", or parallel.schedule {choices(names)}" if names else ""
    return (
        f"parallel.schedule = {run.parallel.schedule} on parallel.pp = {run.parallel.pp} ranks needs {fewest} "
        f"microbatches a step or more, but batch.global_size {size} / (batch.micro_size {micro} x dp {replicas}) = "
        f"{microbatches(run)}; use batch.global_size {fewest * micro * replicas}{other_micro}{other_schedule}"
    )


PIPELINE: tuple[Rule, ...] = (
    Rule(
        "the pipeline schedule is known",
        about=("parallel.schedule",),
        broken=_schedule_fault,
        says=lambda run: f"parallel.schedule = {run.parallel.schedule}: {_schedule_fault(run)}",
    ),
    Rule(
        "chunks are those of the schedule",
        about=("parallel.schedule", "parallel.chunks", "parallel.pp", "model.layers", *MICROBATCHES),
        broken=_chunks_misfit,
        says=_say_chunks,
    ),
    Rule(
        "the schedule has the microbatches that it needs",
        about=("parallel.schedule", "parallel.pp", *MICROBATCHES),
        broken=_too_few_microbatches,
        says=_say_microbatches,
    ),
    Rule(
        "only the greedy schedule has a memory limit",
        about=("parallel.schedule", "parallel.schedule_memory"),
        broken=lambda run: run.parallel.schedule_memory is not None and run.parallel.schedule != "auto",
        says=lambda run: (
            f"parallel.schedule_memory = {run.parallel.schedule_memory:g} limits the greedy schedule, but "
            f"parallel.schedule = {run.parallel.schedule} is fixed; use parallel.schedule auto, or "
            "parallel.schedule_memory null"
        ),
    ),
)
"""What holds between the pipeline's schedule, its ranks and its microbatches."""
