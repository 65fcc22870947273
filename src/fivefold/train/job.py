"""A job is a run made real on one rank: pipeline, optimizer, data, checkpoints and reporting.

What `loop.py` calls each step stands here; `opening.py` puts a job together.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.duration import parse_duration
from fivefold.config.run import Run
from fivefold.data.loader import Loader, Step, validation_batches
from fivefold.errors import RunError
from fivefold.observe.observer import Observer
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.state import ShardedParameter
from fivefold.pipeline.execute import Pipeline
from fivefold.train.build import buffers_of
from fivefold.train.evaluate import validation_loss
from fivefold.train.meter import Meter, Reading
from fivefold.train.placing import ExpertPlacement
from fivefold.train.progress import Progress
from fivefold.train.signals import StopWish
from fivefold.train.sources import RunData, identity
from fivefold.train.watch import watched

Reports = queue.SimpleQueue[tuple[str, dict[str, Any]]]
"""Events (kind, fields) on their way to the observer; the saving thread puts some in."""


@dataclass
class Job:
    """One rank's share of a run that is under way."""

    run: Run
    mesh: Mesh
    data: RunData
    pipeline: Pipeline
    optimizer: ShardedOptimizer
    placement: ExpertPlacement
    progress: Progress
    loader: Loader
    meter: Meter
    observer: Observer
    checkpointer: Checkpointer
    reports: Reports
    last_step: int
    """Where this start ends: the run's last step, or earlier by --stop-after."""
    asked_to_stop: bool = False
    asked_to_save: bool = False
    saved_step: int | None = None
    awaited_step: int | None = None
    """The newest step whose saving this start began."""
    saved_at: float = field(default_factory=time.monotonic)

    def watched(self, batch: Step) -> AbstractContextManager[None]:
        """Around the training on `batch`: measures the pipeline in some of the steps."""
        return watched(self.pipeline, batch, self.progress.step + 1, self.mesh, self.run.folder)

    def save_overdue(self) -> bool:
        """Whether this rank's clock says that it is time for a checkpoint."""
        every = self.run.checkpoint.every
        return isinstance(every, str) and every != "never" and time.monotonic() - self.saved_at >= parse_duration(every)

    def report(self, reading: Reading | None) -> None:
        """Write down a step that was read, and what the ranks agreed on in it."""
        self.report_events()
        if reading is None:
            return
        self.observer.step(reading.record)
        self.observer.experts(reading.record["step"], reading.choices)
        self.placement.count(reading.choices)
        stop, save = reading.asked
        self.asked_to_stop |= stop
        self.asked_to_save |= save
        if reading.not_finite:
            step, more = reading.record["step"], len(reading.not_finite) - 1
            named = reading.not_finite[0] + (f" and {more} more" if more else "")
            message = f"step {step}: the gradient of {named} is not finite; the step changed nothing"
            self.observer.event("step_skipped", step=step, parameters=reading.not_finite, message=message)

    def report_events(self) -> None:
        """Pass on what the saving thread had to say."""
        pass_on(self.reports, self.observer)

    def validation_due(self) -> bool:
        """Whether the validation sets are to be read after this step."""
        every = self.run.validation.every
        step = self.progress.step
        return every is not None and bool(self.data.validation) and (step % every == 0 or step == self.run.total_steps)

    def save_due(self) -> bool:
        """Whether the state is to be saved after this step."""
        every = self.run.checkpoint.every
        if every == "never":
            return False
        return self.ended() or self.asked_to_save or (isinstance(every, int) and self.progress.step % every == 0)

    def ended(self) -> bool:
        """Whether this step was the last of this start."""
        return self.progress.step >= self.last_step or self.asked_to_stop

    def validate(self) -> None:
        """Read the validation sets and report their losses."""
        losses = {}
        for name, source in self.data.validation.items():
            batches = validation_batches(
                source,
                self.run.data.seq_len,
                self.run.validation.tokens,
                self.run.batch.micro_size,
                self.mesh.dp_rank,
                self.mesh.dp,
                self.run.data.document_mask,
            )
            losses[name] = validation_loss(self.pipeline, batches, self.mesh)
        self.observer.validation(self.progress.step, losses)

    def save(self) -> None:
        """Start saving the state; the newest lines of metrics are made durable first. Experts move meanwhile, if a step
        comes after this one."""
        if self.saved_step == self.progress.step:
            return
        self.observer.sync()
        if self.progress.step < self.run.total_steps:
            self.place_experts()
        state = {**self.progress.state(), **self.placement.state(), "data": identity(self.run, self.data)}
        with self.placement.experts_in_order():
            tensors = state_tensors(self.optimizer.parameters, buffers_of(self.pipeline.stages), self.optimizer.state())
            self.checkpointer.save(self.progress.step, tensors, state)
        self.saved_step = self.awaited_step = self.progress.step
        self.saved_at, self.asked_to_save = time.monotonic(), False

    def place_experts(self) -> None:
        """Decide where experts lie from now on, and say so if that changes."""
        moved = self.placement.decide()
        if moved is not None:
            step, (layers, before, after) = self.progress.step, moved
            message = (
                f"step {step}: experts of {layers} layer{'s' * (layers > 1)} are placed anew; the fullest rank has "
                f"{after:.2f} times the mean load, not {before:.2f}"
            )
            fields = {"step": step, "layers": layers, "load_before": before, "load_after": after}
            self.observer.event("experts_moved", **fields, message=message)

    def save_fork(self) -> None:
        """Give a fork a checkpoint of its own before its first step, so that it needs the first run no more."""
        if self.run.checkpoint.every != "never":
            self.save()
            self.checkpointer.wait()

    def finish(self, stop: StopWish) -> None:
        """Wait until all is on disk, and say how this start ended."""
        self.checkpointer.wait()
        self.report_events()
        step, total = self.progress.step, self.run.total_steps
        if self.awaited_step == step and self.checkpointer.saved != step:
            raise RunError(
                f"step {step} could not be saved, as said above; older checkpoints in {self.run.folder} are whole. "
                "Make room or mend the disk, and start the same command again"
            )
        if step >= total:
            self.observer.event("finished", step=step, message=f"finished {self.run.folder}: {step} steps")
        else:
            why = f"after {stop.signal.name}" if stop.signal else "as asked"
            saved = self.run.checkpoint.every != "never"
            then = "the same command goes on from there" if saved else "nothing was saved: checkpoint.every is never"
            message = f"stopped {why} at step {step} of {total}; {then}"
            self.observer.event("stopped", step=step, message=message)


def pass_on(reports: Reports, observer: Observer) -> None:
    """Give the observer the events that wait."""
    while not reports.empty():
        kind, fields = reports.get()
        observer.event(kind, **fields)


def state_tensors(
    parameters: Mapping[str, ShardedParameter], buffers: Mapping[str, Tensor], optimizer_state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name: `model.<parameter or buffer>` and `optim.<kind>.<parameter>`."""
    tensors: dict[str, Tensor] = {f"model.{name}": parameter.whole for name, parameter in parameters.items()}
    tensors |= {f"model.{name}": buffer for name, buffer in buffers.items()}
    return tensors | {f"optim.{name}": value for name, value in optimizer_state.items()}
