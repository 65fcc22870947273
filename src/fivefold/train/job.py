"""A job is a run made real on one rank: model, optimizer, data, checkpoints and reporting, opened and closed together.

Everything that can be refused is refused before the run's folder changes. What the loop does each step stands in
`loop.py`; here is what it calls.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.find import Found
from fivefold.checkpoint.load import stored_names
from fivefold.config.duration import parse_duration
from fivefold.config.run import Run
from fivefold.data.loader import Loader, sample_order, validation_batches
from fivefold.errors import RunError, UserError
from fivefold.observe.observer import Observer, SilentObserver, open_observer
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.mesh import Mesh
from fivefold.train.build import build_model, load_initial_weights
from fivefold.train.evaluate import validation_loss
from fivefold.train.folder import CHECKPOINTS, RunFolder, open_folder, release, replace_file
from fivefold.train.meter import Meter, Reading
from fivefold.train.options import TrainOptions
from fivefold.train.progress import Progress
from fivefold.train.signals import StopWish
from fivefold.train.sources import RunData, check_lengths, check_vocabulary, identity, open_data, vocabulary


@dataclass
class Job:
    """One rank's share of a run that is under way."""

    run: Run
    mesh: Mesh
    data: RunData
    model: nn.Module
    optimizer: ShardedOptimizer
    progress: Progress
    loader: Loader
    meter: Meter
    observer: Observer
    checkpointer: Checkpointer
    reports: queue.SimpleQueue[tuple[str, dict[str, Any]]]
    last_step: int
    """Where this start ends: the run's last step, or earlier by --stop-after."""
    asked_to_stop: bool = False
    asked_to_save: bool = False
    saved_step: int | None = None
    awaited_step: int | None = None
    """The newest step whose saving this start began."""
    saved_at: float = field(default_factory=time.monotonic)

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
        while not self.reports.empty():
            kind, fields = self.reports.get()
            self.observer.event(kind, **fields)

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
            losses[name] = validation_loss(self.model, batches, self.mesh)
        self.observer.validation(self.progress.step, losses)

    def save(self) -> None:
        """Start saving the state; the newest lines of metrics are made durable first."""
        if self.saved_step == self.progress.step:
            return
        self.observer.sync()
        state = {**self.progress.state(), "data": identity(self.run, self.data)}
        self.checkpointer.save(self.progress.step, state_tensors(self.model, self.optimizer.state()), state)
        self.saved_step = self.awaited_step = self.progress.step
        self.saved_at, self.asked_to_save = time.monotonic(), False

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


def state_tensors(model: nn.Module, optimizer_state: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a checkpoint by name: `model.<parameter>` and `optim.<kind>.<parameter>`."""
    tensors: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    return tensors | {f"optim.{name}": value for name, value in optimizer_state.items()}


@contextmanager
def open_job(run: Run, mesh: Mesh, options: TrainOptions) -> Iterator[Job | None]:
    """Open the job, or give None if the run is finished already. Raises UserError for whatever cannot be right."""
    run = resolve(run, mesh)
    data = open_data(run)
    folder = mesh.from_main(lambda: open_folder(run, options))
    run = run.model_copy(update={"name": folder.path.name})
    reports: queue.SimpleQueue[tuple[str, dict[str, Any]]] = queue.SimpleQueue()
    begun = False
    try:
        with closing(_checkpointer(run, folder, reports)) as checkpointer:
            found = _find(folder, checkpointer, mesh)
            progress = _progress(run, data, folder, found)
            if found is not None and progress.step >= progress.with_steps(run).total_steps and not folder.forked:
                _say_finished(progress.with_steps(run), found, mesh)
                yield None
                return
            with _opened(run, mesh, options, data, folder, found, progress, checkpointer, reports) as job:
                begun = True
                yield job
    except (UserError, RunError):
        if mesh.is_main and not begun:
            folder.undo()
        raise
    finally:
        release(folder.path)


def _checkpointer(run: Run, folder: RunFolder, reports: queue.SimpleQueue[tuple[str, dict[str, Any]]]) -> Checkpointer:
    """What it reports, also from its thread, waits in `reports` for the loop to pass it on."""
    return Checkpointer(folder.path / CHECKPOINTS, keep=run.checkpoint.keep, on_event=lambda *event: reports.put(event))


@contextmanager
def _opened(
    run: Run,
    mesh: Mesh,
    options: TrainOptions,
    data: RunData,
    folder: RunFolder,
    found: Found | None,
    progress: Progress,
    checkpointer: Checkpointer,
    reports: queue.SimpleQueue[tuple[str, dict[str, Any]]],
) -> Iterator[Job]:
    asked, run = run, progress.with_steps(run)
    model = build_model(run, mesh)
    optimizer = ShardedOptimizer(model.named_parameters(), run.optim)
    if found is None:
        load_initial_weights(model, run, lambda *event: reports.put(event))
    else:
        has_moments = any(name.startswith("optim.") for name in stored_names(found))
        state = optimizer.materialize() if has_moments else {}
        checkpointer.load(found, state_tensors(model, state))
    observer = _observer(run, mesh, folder, None if found is None else progress.step)
    loader = _loader(run, mesh, data, progress)
    try:
        mesh.from_main(lambda: _write_folder(asked, data, folder))
        _report_start(observer, folder, found, progress)
        last = run.total_steps if options.stop_after is None else progress.step + options.stop_after
        meter = Meter(run, mesh, list(optimizer.parameters))
        saved = None if found is None or folder.forked else progress.step
        job = Job(
            run, mesh, data, model, optimizer, progress, loader, meter, observer, checkpointer, reports,
            min(last, run.total_steps), saved_step=saved,
        )  # fmt: skip
        if folder.forked:
            job.save_fork()
        yield job
    finally:
        loader.close()
        checkpointer.close()
        while not reports.empty():
            kind, fields = reports.get()
            observer.event(kind, **fields)
        observer.close()


def resolve(run: Run, mesh: Mesh) -> Run:
    """The run with what it left open filled in: the vocabulary, the ranks. All data is checked on the main rank."""

    def checked_vocabulary() -> int:
        data = open_data(run)
        vocab = vocabulary(run, data)
        check_vocabulary(data, vocab)
        check_lengths(run, data)
        return vocab

    vocab = mesh.from_main(checked_vocabulary)
    return run.model_copy(
        update={
            "model": run.model.model_copy(update={"vocab": vocab}),
            "parallel": run.parallel.model_copy(update={"dp": mesh.dp}),
            "cluster": run.cluster.model_copy(update={"gpus": mesh.world}),
        }
    )


def _find(folder: RunFolder, checkpointer: Checkpointer, mesh: Mesh) -> Found | None:
    """The checkpoint to go on from. Raises UserError if a fork has none."""
    if not folder.may_resume:
        found = None
    elif folder.forked:
        found = checkpointer.latest_of(folder.origin / CHECKPOINTS)
    else:
        found = checkpointer.latest()
    if found is None and folder.forked:
        mesh.from_main(lambda: _refuse_nothing(folder))
    return found


def _refuse_nothing(folder: RunFolder) -> None:
    raise UserError(f"{folder.origin} has no checkpoint to start from; train it first")


def _progress(run: Run, data: RunData, folder: RunFolder, found: Found | None) -> Progress:
    """Where to go on. Raises UserError if the data is not what it was, unless a fork reads other data on purpose."""
    if found is None:
        return Progress()
    progress = Progress.of(found.state)
    before, now = found.state["data"], identity(run, data)
    if before == now:
        return progress
    if folder.forked:
        return Progress(progress.step, 0, progress.tokens)
    listed = "\n".join(f"  {old} -> {new}" for old, new in zip(before, now, strict=False) if old != new)
    raise UserError(
        f"the training data of {folder.path} is not what {found.folder.name} was trained on:\n{listed}\n"
        "Put the old data back; or give this run another name, use --fork to go on with new data, or --restart."
    )


def _observer(run: Run, mesh: Mesh, folder: RunFolder, resume_step: int | None) -> Observer:
    """This rank's observer. If the main rank cannot open its files, all end alike."""
    opened: list[Observer] = []
    mesh.from_main(lambda: opened.append(open_observer(run, folder.path, resume_step, mesh.rank)))
    return opened[0] if opened else SilentObserver()


def _loader(run: Run, mesh: Mesh, data: RunData, progress: Progress) -> Loader:
    weights = [source.weight for source in run.data.train]
    return Loader(
        data.train,
        sample_order(data.train, weights, run.data.seq_len, run.seed),
        seq_len=run.data.seq_len,
        document_mask=run.data.document_mask,
        global_size=run.batch.global_size,
        micro_size=run.batch.micro_size,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp,
        samples=progress.samples,
        device=mesh.device,
    )


def _write_folder(run: Run, data: RunData, folder: RunFolder) -> None:
    try:
        for name, text in data.tokenizer.files().items() if data.tokenizer is not None else ():
            replace_file(folder.path / name, text)
        folder.write_run_file(run)
    except OSError as error:
        raise RunError(f"cannot write into the run's folder {folder.path}: {error.strerror or error}") from error


def _report_start(observer: Observer, folder: RunFolder, found: Found | None, progress: Progress) -> None:
    if found is None:
        observer.event("started", message=f"started {folder.path}")
        return
    verb = "forked" if folder.forked else "resumed"
    changes = [{"key": key, "from": str(old), "to": str(new)} for key, old, new in folder.changes]
    listed = "".join(f"\n  {each['key']}: {each['from']} -> {each['to']}" for each in changes)
    message = f"{verb} from {found.folder} at step {progress.step}{listed}"
    observer.event(verb, step=progress.step, checkpoint=str(found.folder), changes=changes, message=message)


def _say_finished(run: Run, found: Found, mesh: Mesh) -> None:
    if mesh.is_main:
        print(
            f"{run.folder} is finished: {found.folder.name} is step {found.step} of {run.total_steps}. "
            "Nothing was changed; more steps go on from there."
        )
