"""One object through which the train loop reports: it fans out to files, charts and the console.

Rank 0 has the real one, all others a twin that does nothing, so the loop has no `if rank == 0`. Reporting never stops
training: a chart that fails is turned off and a full disk is waited out, each with one event. Only what a person asked
for and cannot have (no wandb, no folder to write to) is an error, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fivefold.config.run import Run
from fivefold.errors import RunError
from fivefold.observe.console import Console, NoConsole, describe_validation, open_console
from fivefold.observe.events import EventsFile
from fivefold.observe.metrics import MetricsFile, StepRecord
from fivefold.observe.sinks import Sink, TensorBoard, WeightsAndBiases, require_sinks, scalars

METRICS, EVENTS, EXPERTS = "metrics.jsonl", "events.jsonl", "experts.jsonl"
"""Their names in the run's folder."""


class Observer(Protocol):
    """What the train loop may report.

    Order in step k: `step`, `experts`, `validation`, `sync`, then the checkpoint of step k.
    """

    def step(self, record: StepRecord) -> None:
        """An optimizer step is done."""

    def experts(self, step: int, choices: Mapping[int, Sequence[int]]) -> None:
        """How often each expert was chosen in `step`, by the number of its layer; nothing for a model without them."""

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        """The validation sets were read after `step`; the values join that step's line as val_loss/NAME."""

    def event(self, kind: str, **fields: Any) -> None:
        """Something happened beside the steps. A field `message` is what the console shows."""

    def sync(self) -> None:
        """Make all lines durable: before the checkpoint of the newest step becomes the newest one."""

    def close(self) -> None:
        """Write what is held back, everywhere."""


def open_observer(run: Run, folder: Path, resume_step: int | None, rank: int) -> Observer:
    """The observer of `rank` for the run that writes to `folder`.

    `resume_step` is the step of the checkpoint that the run goes on from, None for a start from nothing. Raises
    UserError for a sink that is not installed, RunError if the folder cannot be written.
    """
    if rank:
        return SilentObserver()
    require_sinks(run)
    console = open_console(run.total_steps, resume_step or 0)
    return RunObserver(run, folder, resume_step, console)


class SilentObserver:
    """Takes all reports and does nothing: the observer of every rank but the first."""

    def step(self, record: StepRecord) -> None:
        """Nothing."""

    def experts(self, step: int, choices: Mapping[int, Sequence[int]]) -> None:
        """Nothing."""

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Nothing."""

    def event(self, kind: str, **fields: Any) -> None:
        """Nothing."""

    def sync(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class RunObserver:
    """Writes the files of lines in `folder`, and feeds the console and the charts that the run asks for."""

    def __init__(self, run: Run, folder: Path, resume_step: int | None, console: Console) -> None:
        try:
            self._metrics = MetricsFile(folder / METRICS, resume_step)
            self._events = EventsFile(folder / EVENTS)
            self._experts = None if run.model.moe is None else MetricsFile(folder / EXPERTS, resume_step)
        except OSError as error:
            raise RunError(f"cannot write the run's files in {folder}: {error.strerror or error}") from error
        self._every = run.log.every
        self._last = run.total_steps
        self._console = console
        self._refused: set[str] = set()
        self._sinks: list[Sink] = []
        if run.log.tensorboard:
            self._open_sink("tensorboard", lambda: TensorBoard(folder / "tensorboard", resume_step))
        if run.log.wandb != "off":
            self._open_sink("wandb", lambda: WeightsAndBiases(run, folder / "wandb"))

    def step(self, record: StepRecord) -> None:
        """Every step goes to metrics.jsonl; the first, the last and every log.every-th to console and charts too."""
        step = record["step"]
        self._keep(METRICS, lambda: self._metrics.write(step, record))
        if self._due(step):
            self._show(lambda: self._console.step(record))
            self._chart(step, record)

    def experts(self, step: int, choices: Mapping[int, Sequence[int]]) -> None:
        """The first step, the last and every log.every-th go to experts.jsonl."""
        file = self._experts
        if file is not None and self._due(step):
            self._keep(EXPERTS, lambda: file.write(step, {"counts": choices}))

    def validation(self, step: int, losses: Mapping[str, float]) -> None:
        """Always shown, whatever log.every is."""
        fields = {f"val_loss/{name}": loss for name, loss in losses.items()}
        self._keep(METRICS, lambda: self._metrics.write(step, fields))
        self._show(lambda: self._console.message(describe_validation(step, losses)))
        self._chart(step, fields)

    def event(self, kind: str, **fields: Any) -> None:
        """One line in events.jsonl and one on the console."""
        self._keep(EVENTS, lambda: self._events.write(kind, **fields))
        self._show(lambda: self._console.message(str(fields.get("message") or _describe_event(kind, fields))))

    def sync(self) -> None:
        """A disk that refuses is no reason to stop: the lines wait, and a resume repeats the steps that it lacks."""
        for name, file in self._files().items():
            self._keep(name, file.sync)

    def close(self) -> None:
        """Charts first, so that their failure is still an event."""
        for sink in list(self._sinks):
            self._guard(sink, sink.close)
        self._sinks.clear()
        self._show(self._console.close)
        for name, file in self._files().items():
            self._keep(name, file.close)

    def _files(self) -> dict[str, MetricsFile | EventsFile]:
        files: dict[str, MetricsFile | EventsFile] = {METRICS: self._metrics, EVENTS: self._events}
        return files if self._experts is None else {**files, EXPERTS: self._experts}

    def _due(self, step: int) -> bool:
        return step % self._every == 0 or step in (1, self._last)

    def _show(self, call: Callable[[], None]) -> None:
        """A terminal that was closed under the run takes nothing more."""
        try:
            call()
        except OSError:
            self._console = NoConsole()

    def _chart(self, step: int, fields: Mapping[str, Any]) -> None:
        for sink in list(self._sinks):
            self._guard(sink, lambda sink=sink: sink.write(step, scalars(fields)))  # type: ignore[misc]

    def _open_sink(self, name: str, open_: Callable[[], Sink]) -> None:
        try:
            self._sinks.append(open_())
        except Exception as error:
            self._off(name, error)

    def _guard(self, sink: Sink, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._sinks.remove(sink)
            self._off(sink.name, error)

    def _off(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.event("sink_off", sink=name, reason=reason, message=f"{name} is off from here on: {reason}")

    def _keep(self, name: str, write: Callable[[], None]) -> None:
        """Write to a file of the run; a disk that refuses is reported once, until it takes lines again."""
        try:
            write()
        except OSError as error:
            if name not in self._refused:
                self._refused.add(name)
                text = f"{name}: {error.strerror or error}; training goes on, its lines wait in memory for room"
                self._show(lambda: self._console.message(text))
        else:
            self._refused.discard(name)


def _describe_event(kind: str, fields: Mapping[str, Any]) -> str:
    return "  ".join([kind.replace("_", " "), *(f"{key}={value}" for key, value in fields.items())])
