"""From a run file to work: start local workers, or be one.

`start_training` is what `fivefold train` calls, `train` the same from Python. The process that starts local workers
reads and checks the run file first, so what is wrong with it is said once and before anything is launched.
"""

from __future__ import annotations

import gc
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fivefold.config.files import ConfigError, dump_run, load_run
from fivefold.config.rules import RULES, check, with_world
from fivefold.config.run import Run
from fivefold.errors import RunError, UserError
from fivefold.hardware.rule import ACCELERATOR
from fivefold.launch.environment import is_worker
from fivefold.launch.local import run_workers, visible_gpus
from fivefold.observe.sinks import require_sinks
from fivefold.pipeline.of_run import schedule_of_run
from fivefold.train.options import TrainOptions

OTHERS_WAIT_S = 10.0  # before another rank repeats an error: the main rank has said it, and the launcher ended all


def start_training(run_file: Path, overrides: Sequence[str], options: TrainOptions) -> int:
    """Train the run in `run_file`, as a worker or by starting workers; the exit code.

    Raises UserError before anything is launched or written if the run file or an input is wrong.
    """
    run = load_run(run_file, overrides, rules=())  # asked below, all at once, for the ranks that will run
    if is_worker(options.launcher):
        return _work(run, options)
    count = local_workers(run, options)
    _check(run, count, str(run_file))
    return run_workers(["train", str(run_file), *overrides, *_flags(options)], count)


def train(run: Run, **options: Any) -> Path:
    """Train `run` and return its folder. `options` are those of `TrainOptions`; with `nproc` above 1, in new processes.

    Raises UserError if an input is wrong, RunError if the run could not go on.
    """
    chosen = TrainOptions(**options)
    if is_worker(chosen.launcher):
        _work(run, chosen)
    elif local_workers(run, chosen) == 1:
        _check(run, 1)
        _work(run, chosen)
    else:
        with tempfile.TemporaryDirectory(prefix="fivefold-") as folder:
            file = Path(folder) / "run.yaml"
            file.write_text(dump_run(run), encoding="utf-8")
            code = start_training(file, [], chosen)
        if code:
            raise RunError(f"training {run.name} ended with exit code {code}; what happened stands above")
    return run.folder if chosen.fork is None else run.out / chosen.fork


def local_workers(run: Run, options: TrainOptions) -> int:
    """How many workers to start on this machine: as asked, as the run file says, one a GPU, or one."""
    if options.nproc is not None:
        return options.nproc
    return run.cluster.gpus if run.cluster.gpus != "auto" else max(1, visible_gpus())


def _check(run: Run, world: int, source: str | None = None) -> None:
    """Raises UserError for a run that cannot be: its rules for `world` ranks, its packages, and its schedule."""
    if broken := check(run, world, (*RULES, ACCELERATOR)):
        raise ConfigError(broken, source)
    require_sinks(run)
    schedule_of_run(with_world(run, world))


def _flags(options: TrainOptions) -> list[str]:
    """The command line of a worker that is started with `options`."""
    flags = ["--launcher", "env", "--resume", options.resume]
    if options.stop_after is not None:
        flags += ["--stop-after", str(options.stop_after)]
    if options.restart:
        flags.append("--restart")
    if options.fork is not None:
        flags += ["--fork", options.fork]
    return flags


def _work(run: Run, options: TrainOptions) -> int:
    """Be one rank of the run; imports torch. Whatever ends it, the threads of its process groups end with it."""
    try:
        return _join_and_train(run, options)
    except (UserError, RunError, SystemExit) as error:
        # An error holds the frames that hold the groups. A thread of gloo that outlives Python aborts the process.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
        raise


def _join_and_train(run: Run, options: TrainOptions) -> int:
    """Meet the other ranks and train; the exit code."""
    import torch.distributed as dist

    from fivefold.parallel.mesh import joined, mesh_of
    from fivefold.train.loop import train as train_loop

    with joined() as device:
        try:
            _check(run, dist.get_world_size())
            return train_loop(run, mesh_of(run.parallel, device), options)
        except (UserError, RunError):
            if dist.get_rank() != 0:
                time.sleep(OTHERS_WAIT_S)
            raise
