"""The schedule of a run: made by its name, or read from its file, and checked before anything is launched.

Imports no torch.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from fivefold.config.run import Run
from fivefold.config.schedules import is_file
from fivefold.errors import UserError
from fivefold.pipeline.check import require_sound
from fivefold.pipeline.named import SCHEDULES, make_schedule, placement_of
from fivefold.pipeline.schedule import Schedule
from fivefold.pipeline.stage_bytes import ByteCount
from fivefold.pipeline.text import read_csv


def schedule_of_run(run: Run) -> Schedule:
    """The schedule of a legal run whose ranks are known.

    Raises UserError if its file cannot be read, is for other ranks, chunks or microbatches, or if it cannot run.
    """
    parallel, microbatches = run.parallel, microbatches_of(run)
    if is_file(parallel.schedule):
        return schedule_of_file(run, microbatches)
    if parallel.schedule in SCHEDULES and parallel.schedule != "auto":
        return named_schedule(parallel.schedule, parallel.pp, microbatches, parallel.chunks)
    schedule = make_schedule(
        parallel.schedule,
        parallel.pp,
        microbatches,
        parallel.chunks,
        memory=parallel.schedule_memory,
        weight=ByteCount(run).waiting_share(),
    )
    _require_fit(schedule, run, microbatches)
    require_sound(schedule)
    return schedule


@lru_cache(maxsize=64)
def named_schedule(name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """A schedule that depends on nothing else, once for all who ask. Raises UserError as `make_schedule`, and if it
    cannot run."""
    schedule = make_schedule(name, ranks, microbatches, chunks)
    require_sound(schedule)
    return schedule


def schedule_of_file(run: Run, microbatches: int | None) -> Schedule:
    """The schedule in the file that a legal run names, for any number of microbatches if None.

    Raises UserError as `schedule_of_run`.
    """
    schedule = _read(run.parallel.schedule)
    _require_fit(schedule, run, microbatches)
    require_sound(schedule)
    return schedule


def placement_of_run(run: Run) -> tuple[int, ...]:
    """Which pipeline rank has each stage, of a run whose number of replicas may be unknown.

    Raises UserError if its schedule is a file that cannot be read.
    """
    parallel = run.parallel
    if is_file(parallel.schedule):
        return _read(parallel.schedule).placement
    return placement_of(parallel.schedule, parallel.pp, parallel.chunks)


def microbatches_of(run: Run) -> int:
    """Microbatches of a rank in a step. The replicas must be known."""
    assert run.parallel.dp != "auto", "the ranks are known"
    return run.batch.global_size // (run.batch.micro_size * run.parallel.dp)


def _read(file: str) -> Schedule:
    try:
        return read_csv(Path(file))
    except OSError as error:
        raise UserError(f"parallel.schedule = {file} cannot be read: {error.strerror or error}") from error


def _require_fit(schedule: Schedule, run: Run, microbatches: int | None) -> None:
    """Raises UserError with each number in which a schedule that somebody else made is not that of the run."""
    parallel = run.parallel
    there = {
        "ranks": (len(schedule.ranks), parallel.pp, "parallel.pp"),
        "stages": (schedule.stages, parallel.pp * parallel.chunks, "parallel.pp x parallel.chunks"),
        "microbatches": (schedule.microbatches, microbatches, "batch.global_size / (batch.micro_size x dp)"),
    }
    wrong = [
        f"it has {found} {what}, but {says} = {wanted}"
        for what, (found, wanted, says) in there.items()
        if wanted is not None and found != wanted
    ]
    if wrong:
        raise UserError(f"parallel.schedule = {parallel.schedule} is not for this run: {'; '.join(wrong)}")
