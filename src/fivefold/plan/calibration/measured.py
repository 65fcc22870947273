"""What a run measured of itself while it trained: medians over its steady steps, read from its folder.

Steps belong together that one start of the run took: another may have had another layout or device. The first steps of
a start compile and allocate, and the step behind a validation or a checkpoint finds cold caches: these are left out.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from fivefold.config.files import load_run
from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.observe.events import CPU, read_events
from fivefold.observe.history import RUN_FILE
from fivefold.observe.metrics import read_metrics
from fivefold.observe.observer import EVENTS, METRICS
from fivefold.pipeline.measured import PIPELINE_FILE, Measured
from fivefold.plan.memory.peak import GIB
from fivefold.plan.run_folder import RUNS, run_folder

FIRST = 5
"""Steps of a start that are left out: kernels are compiled in them, and the allocator finds its size."""
LEAST = 10
"""Steady steps below which a median says little."""
LEAST_VALUE, MOST_VALUE = 1e-9, 1e12
"""Between these lies what a run measures: shares, seconds, GiB. What lies beyond is a damaged line."""
STARTS = ("started", "resumed", "forked")
"""Events of a start."""


@dataclass(frozen=True)
class RunMeasured:
    """A run's own figures. None is what it did not measure."""

    folder: Path
    run: Run
    """As its folder has it: of its newest start."""
    device: str | None
    """That its newest start reported: a driver's name, or `CPU`."""
    steps: Sequence[int]
    """The steady ones, over which medians are taken."""
    trained: int
    """All steps of the newest start."""
    step_seconds: float
    spread: tuple[float, float]
    """Between these lie eight of ten steady steps, in seconds."""
    tokens_per_s: float
    mfu: float | None
    update: float | None
    """Seconds of the update of the weights."""
    exchange: float | None
    """Seconds in which the device stood still for all-to-alls between experts."""
    memory: float | None
    """Bytes in tensors at most, of any rank; None on a CPU, which knows only what a whole process holds."""
    pipeline: Measured | None
    """One step of the pipeline, action by action."""

    @property
    def name(self) -> str:
        """Of the run."""
        return self.run.name

    def says(self) -> str:
        """Which run, where it ran, and over how many steps."""
        low, high = self.spread
        device = self.device or self.run.cluster.gpu
        return (
            f"run {self.name} ({self.folder}) on {self.run.cluster.gpus} {device}: medians of {len(self.steps)} steady "
            f"steps of {self.trained}, eight of ten between {low:.4g} and {high:.4g} s"
        )


def read_run(text: str) -> RunMeasured:
    """The run in a folder, or of that name in `runs`.

    Raises UserError if there is none, if it has not trained enough steps, or if its files cannot be read.
    """
    folder = run_folder(text, holds=RUN_FILE)
    if folder is None:
        raise UserError(
            f"--calibrate {text} is no run: neither {text} nor {RUNS / text} holds a {RUN_FILE}; name the folder of a "
            "run that was trained, such as runs/tiny"
        )
    run = load_run(folder / RUN_FILE, rules=())
    try:
        lines = [line for line in read_metrics(folder / METRICS) if _is_step(line.get("step"))]
        events = read_events(folder / EVENTS)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror or error}") from error
    return _measured(folder, run, lines, events)


def _measured(
    folder: Path, run: Run, lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> RunMeasured:
    start: Mapping[str, Any] = next(filter(_is_start, reversed(events)), {})
    began, device = start.get("step") or 0, start.get("device")
    own = [line for line in lines if _is_number(line.get("step_s")) and line["step"] > began]
    if not own:
        raise UserError(f"{folder / METRICS} has no step yet that its newest start trained; calibrate with it later")
    pipeline = _pipeline(folder, run, began)
    left_out = _disturbed(lines, run) | ({pipeline.step} if pipeline else set())
    steady = [line for line in own[FIRST:] if line["step"] not in left_out]
    if len(steady) < LEAST:
        raise UserError(
            f"{folder} has {len(steady)} steady steps, and {LEAST} are needed: its newest start trained {len(own)}, of "
            f"which the first {FIRST} and those behind a validation or a checkpoint do not count; train some more"
        )
    seconds = [line["step_s"] for line in steady]
    tenths = quantiles(seconds, n=10, method="inclusive")
    peak = max((line["mem_peak_gib"] for line in own if _is_number(line.get("mem_peak_gib"))), default=None)
    return RunMeasured(
        folder=folder,
        run=run,
        device=device if isinstance(device, str) else None,
        steps=tuple(line["step"] for line in steady),
        trained=len(own),
        step_seconds=median(seconds),
        spread=(tenths[0], tenths[-1]),
        tokens_per_s=median(run.batch.global_size * run.data.seq_len / each for each in seconds),
        mfu=_median(line.get("mfu") for line in steady),
        update=_median(line.get("update_s") for line in steady),
        exchange=_median(line.get("moe_exchange_s") for line in steady),
        memory=None if peak is None or device == CPU else peak * GIB,
        pipeline=pipeline,
    )


def _disturbed(lines: Sequence[Mapping[str, Any]], run: Run) -> set[int]:
    """The steps behind a validation or a checkpoint."""
    every = run.checkpoint.every
    return {
        line["step"] + 1
        for line in lines
        if any(key.startswith("val_loss/") for key in line) or (isinstance(every, int) and line["step"] % every == 0)
    }


def _pipeline(folder: Path, run: Run, began: int) -> Measured | None:
    """The step that was measured action by action, if this start and this layout did it."""
    file = folder / PIPELINE_FILE
    if run.parallel.pp == 1 or not file.is_file():
        return None
    found = Measured.load(file)
    stages = run.parallel.pp * run.parallel.chunks
    return found if found.step > began and found.schedule.stages == stages else None


def _median(values: Iterable[Any]) -> float | None:
    numbers = [value for value in values if _is_number(value)]
    return median(numbers) if numbers else None


def _is_start(event: Mapping[str, Any]) -> bool:
    """Whether an event is a start, and says the step that it went on from, if any."""
    return event.get("kind") in STARTS and (event.get("step") is None or _is_step(event["step"]))


def _is_step(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and LEAST_VALUE <= value <= MOST_VALUE
