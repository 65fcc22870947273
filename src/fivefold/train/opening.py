"""Opening a job: everything is found and checked, then loaded, and closed in the opposite order.

Everything that can be refused is refused before the run's folder changes; what is refused later takes back what this
start made there.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.find import Found
from fivefold.checkpoint.load import stored_names
from fivefold.config.files import ConfigError
from fivefold.config.rules import check
from fivefold.config.run import Run
from fivefold.data.loader import Loader, sample_order
from fivefold.durable import replace_file
from fivefold.errors import RunError, UserError
from fivefold.observe.events import CPU
from fivefold.observe.observer import Observer, SilentObserver, open_observer
from fivefold.optim.offload import optimizer_for
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.state import sharded_parameters
from fivefold.pipeline.execute import Pipeline
from fivefold.train.build import buffers_of, build_pipeline, load_initial_weights
from fivefold.train.folder import CHECKPOINTS, RunFolder, open_folder, release
from fivefold.train.job import Job, Reports, pass_on, state_tensors
from fivefold.train.meter import Meter
from fivefold.train.options import TrainOptions
from fivefold.train.placing import ExpertPlacement
from fivefold.train.progress import Progress
from fivefold.train.sources import RunData, check_lengths, check_vocabulary, identity, open_data, vocabulary


@dataclass(frozen=True)
class Start:
    """What this start of a run begins with."""

    run: Run
    data: RunData
    folder: RunFolder
    found: Found | None
    """The checkpoint to go on from; None begins at step 0."""
    progress: Progress


@contextmanager
def open_job(run: Run, mesh: Mesh, options: TrainOptions) -> Iterator[Job | None]:
    """Open the job, or give None if the run is finished already. Raises UserError for whatever cannot be right."""
    run = resolve(run, mesh)
    data = open_data(run)
    folder = mesh.from_main(lambda: open_folder(run, options))
    run = run.model_copy(update={"name": folder.path.name})
    reports: Reports = queue.SimpleQueue()
    begun = False
    try:
        with closing(_checkpointer(run, folder, reports)) as checkpointer:
            found = _find(folder, checkpointer, mesh)
            progress = _progress(run, data, folder, found)
            if found is not None and progress.step >= progress.with_steps(run).total_steps and not folder.forked:
                _say_finished(progress.with_steps(run), found, mesh)
                yield None
                return
            start = Start(run, data, folder, found, progress)
            with _opened(start, mesh, options, checkpointer, reports) as job:
                begun = True
                yield job
    except (UserError, RunError):
        if mesh.is_main and not begun:
            folder.undo()
        raise
    finally:
        release(folder.path)


def _checkpointer(run: Run, folder: RunFolder, reports: Reports) -> Checkpointer:
    """What it reports, also from its thread, waits in `reports` for the loop to pass it on."""
    return Checkpointer(folder.path / CHECKPOINTS, keep=run.checkpoint.keep, on_event=lambda *event: reports.put(event))


@contextmanager
def _opened(
    start: Start, mesh: Mesh, options: TrainOptions, checkpointer: Checkpointer, reports: Reports
) -> Iterator[Job]:
    run, progress = start.progress.with_steps(start.run), start.progress
    pipeline, optimizer = _pipeline(start, mesh, checkpointer, reports)
    placement = ExpertPlacement(run, pipeline, optimizer, mesh)
    if start.found is not None:
        placement.restore(start.found.state)
    observer = _observer(run, mesh, start.folder, None if start.found is None else progress.step)
    loader = _loader(run, mesh, start.data, progress)
    try:
        mesh.from_main(lambda: _write_folder(start))
        _report_start(observer, start, mesh.device)
        steps_here = run.total_steps if options.stop_after is None else options.stop_after
        job = Job(
            run=run,
            mesh=mesh,
            data=start.data,
            pipeline=pipeline,
            optimizer=optimizer,
            placement=placement,
            progress=progress,
            loader=loader,
            meter=Meter(run, mesh, optimizer.names),
            observer=observer,
            checkpointer=checkpointer,
            reports=reports,
            last_step=min(progress.step + steps_here, run.total_steps),
            saved_step=None if start.found is None or start.folder.forked else progress.step,
        )
        if start.folder.forked:
            job.save_fork()
        yield job
    finally:
        loader.close()
        checkpointer.close()
        pass_on(reports, observer)
        observer.close()


def _pipeline(
    start: Start, mesh: Mesh, checkpointer: Checkpointer, reports: Reports
) -> tuple[Pipeline, ShardedOptimizer]:
    """The stages of the model and their optimizer, as they were when the checkpoint was saved, or new."""
    pipeline = build_pipeline(start.run, mesh)
    pipeline.connect()
    parameters, buffers = sharded_parameters(pipeline.stages, mesh), buffers_of(pipeline.stages)
    optimizer = optimizer_for(parameters, start.run.optim, start.run.offload, mesh.pp)
    if start.found is None:
        load_initial_weights(parameters, buffers, start.run, lambda *event: reports.put(event))
    else:
        has_moments = any(name.startswith("optim.") for name in stored_names(start.found))
        state = optimizer.materialize() if has_moments else {}
        checkpointer.load(start.found, state_tensors(parameters, buffers, state))
    pipeline.renew_copies()
    return pipeline, optimizer


def resolve(run: Run, mesh: Mesh) -> Run:
    """The run with what it left open filled in: the vocabulary, the ranks. All data is checked on the main rank.

    The rules are asked again: how many rows of the vocabulary each rank of tp has is known only now.
    """

    def checked_vocabulary() -> int:
        data = open_data(run)
        vocab = vocabulary(run, data)
        check_vocabulary(data, vocab)
        check_lengths(run, data)
        return vocab

    vocab = mesh.from_main(checked_vocabulary)
    resolved = run.model_copy(
        update={
            "model": run.model.model_copy(update={"vocab": vocab}),
            "parallel": run.parallel.model_copy(update={"dp": mesh.dp}),
            "cluster": run.cluster.model_copy(update={"gpus": mesh.world}),
        }
    )
    if broken := check(resolved):
        raise ConfigError(broken)
    return resolved


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
        mtp=run.model.mtp,
        device=mesh.device,
    )


def _write_folder(start: Start) -> None:
    tokenizer, folder = start.data.tokenizer, start.folder
    try:
        for name, text in tokenizer.files().items() if tokenizer is not None else ():
            replace_file(folder.path / name, text)
        folder.write_run_file(start.run)
    except OSError as error:
        raise RunError(f"cannot write into the run's folder {folder.path}: {error.strerror or error}") from error


def _report_start(observer: Observer, start: Start, device: torch.device) -> None:
    """With the device of the main rank: what was measured says little of another."""
    folder, found, step = start.folder, start.found, start.progress.step
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else CPU
    if found is None:
        aside = "" if folder.archived is None else f"; the earlier run of this name is now {folder.archived}"
        observer.event("started", device=name, message=f"started {folder.path}{aside}")
        return
    verb = "forked" if folder.forked else "resumed"
    changes = [{"key": key, "from": str(old), "to": str(new)} for key, old, new in folder.changes]
    listed = "".join(f"\n  {each['key']}: {each['from']} -> {each['to']}" for each in changes)
    message = f"{verb} from {found.folder} at step {step}{listed}"
    observer.event(verb, step=step, device=name, checkpoint=str(found.folder), changes=changes, message=message)


def _say_finished(run: Run, found: Found, mesh: Mesh) -> None:
    if mesh.is_main:
        print(
            f"{run.folder} is finished: {found.folder.name} is step {found.step} of {run.total_steps}. "
            "Nothing was changed; more steps go on from there."
        )
