"""The folder of a run: whose it is, who writes to it, and whether this start may go on from what lies there.

`open_folder` decides; it runs on the main rank only and changes nothing before every question is answered. What only
the model or a checkpoint can refuse is found after that: `undo` then leaves all as it was. One process group holds a
folder at a time, by a lock that the kernel drops when its process dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from fivefold.checkpoint.folder import CheckpointFolder
from fivefold.config.files import ConfigError, difference, dump_run, load_run
from fivefold.config.rules import check
from fivefold.config.run import Run
from fivefold.durable import replace_file, unfinished
from fivefold.errors import UserError
from fivefold.train.options import TrainOptions

RUN_FILE = "run.yaml"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
ARCHITECTURE_NAMES = ("model.preset", "model.from", "model.weights")  # where it came from, not what it is
Difference = tuple[str, Any, Any]
_held: dict[Path, IO[str]] = {}  # locks of this process: open as long as it lives


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes, and what it goes on from."""

    path: Path
    origin: Path
    """The folder whose checkpoints this start may load: `path`, or that of the run it was forked from."""
    may_resume: bool
    changes: list[Difference] = field(default_factory=list)
    """What the run file says differently from the start before: key, old value, new value."""
    made: tuple[Path, ...] = ()
    """The folders that this start made, `path` first; none if it goes on in what was there."""
    archived: Path | None = None
    """Where this start moved an earlier run."""

    @property
    def forked(self) -> bool:
        """Whether the checkpoints belong to another run."""
        return self.origin != self.path

    def write_run_file(self, run: Run) -> None:
        """Put the resolved run file in place, whole."""
        replace_file(self.path / RUN_FILE, dump_run(run))

    def undo(self) -> None:
        """Take back what `open_folder` did, as this start was refused before its first step."""
        if not self.made:
            return
        release(self.path)
        shutil.rmtree(self.path)
        for parent in self.made[1:]:
            with suppress(OSError):
                parent.rmdir()
        if self.archived is not None:
            self.archived.rename(self.path)


def open_folder(run: Run, options: TrainOptions) -> RunFolder:
    """Take the folder of `run` (of its fork, if the options say so) for this process.

    Raises UserError if it holds another run, is in use, cannot be written, or if the run file changed what a resume
    cannot change.
    """
    held = set(_held)
    try:
        return _open_folder(run, options)
    except BaseException as error:
        for path in set(_held) - held:
            release(path)
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"cannot write the run's folder {run.folder}: {error.strerror or error}; make room, or choose another out"
        ) from error


def _open_folder(run: Run, options: TrainOptions) -> RunFolder:
    if options.fork is not None:
        return _fork(run, options.fork)
    path = run.folder
    archived = None
    if options.restart and _holds_run(path):
        _lock(path)
        archived = _archive(path)
    earlier = _earlier_run(path)
    if earlier is None and options.resume == "must":
        raise UserError(f"there is no run in {path} to go on from; leave --resume at auto to start one")
    if earlier is not None:
        _lock(path)
        if options.resume == "never":
            raise UserError(f"{path} holds a run already, and --resume is never; use --restart, or another name")
    if earlier is not None and CheckpointFolder(path / CHECKPOINTS).steps():
        return RunFolder(path, path, may_resume=True, changes=check_changes(run, earlier))
    if options.resume == "must":
        raise UserError(f"{path} has no checkpoint to go on from; leave --resume at auto to start from step 0")
    return _new_folder(run, RunFolder(path, path, may_resume=False, archived=archived))


def _new_folder(run: Run, folder: RunFolder) -> RunFolder:
    """Make the folder. Its run file comes first: whatever is killed after that leaves a run behind, not a riddle."""
    made = tuple(each for each in (folder.path, *folder.path.parents) if not each.exists())
    folder.path.mkdir(parents=True, exist_ok=True)
    _lock(folder.path)
    folder = replace(folder, made=made)
    try:
        folder.write_run_file(run)
    except OSError:
        folder.undo()
        raise
    return folder


def check_changes(run: Run, earlier: Run) -> list[Difference]:
    """What `run` says differently from `earlier`, if a resume may change it. Raises UserError with what it may not."""
    changes = [change for change in difference(earlier, run) if change[0] not in ("name", "out")]
    refused = [change for change in changes if _is_fixed(change[0])]
    if refused:
        listed = "\n".join(f"  {key}: {_short(old)} -> {_short(new)}" for key, old, new in refused)
        raise UserError(
            f"{run.folder} holds a run with another model, data or seed:\n{listed}\n"
            "Put these back to resume it; or give this run another name, or --restart to move the old one aside."
        )
    return changes


def _is_fixed(key: str) -> bool:
    """Whether a resume may not change this key; where the data lies may change, what it is is compared by content."""
    if key == "seed" or (key.startswith("model.") and key not in ARCHITECTURE_NAMES):
        return True
    if key.startswith("data.train"):
        return not key.endswith(".path")
    return key in ("data.seq_len", "data.document_mask")


def _fork(run: Run, name: str) -> RunFolder:
    origin, path = run.folder, run.out / name
    earlier = _earlier_run(origin)
    if earlier is None:
        raise UserError(f"--fork {name}: there is no run in {origin} to start from")
    renamed = run.model_copy(update={"name": name})
    if problems := check(renamed):
        raise ConfigError(problems, f"--fork {name}")
    if _earlier_run(path) is not None and _has_begun(path):
        raise UserError(
            f"--fork {name}: {path} exists already; resume that run with --name {name}, or fork to another name"
        )
    model = [change for change in difference(earlier, run) if _is_fixed(change[0]) and change[0].startswith("model.")]
    if model:
        listed = ", ".join(f"{key}: {_short(old)} -> {_short(new)}" for key, old, new in model)
        raise UserError(f"--fork {name}: the weights of {origin} do not fit another model ({listed})")
    changes = difference(earlier, run)
    return _new_folder(renamed, RunFolder(path, origin, may_resume=True, changes=changes))


def _has_begun(path: Path) -> bool:
    """Whether a run has something that a new start would lose; one that was killed while it started has nothing."""
    metrics = path / METRICS
    return bool(CheckpointFolder(path / CHECKPOINTS).steps()) or (metrics.exists() and metrics.stat().st_size > 0)


def _earlier_run(path: Path) -> Run | None:
    """The run that the folder holds, None if there is none. Raises UserError if it cannot be told, or as below."""
    if not _holds_run(path):
        return None
    try:
        return load_run(path / RUN_FILE)
    except ConfigError as error:
        raise UserError(f"{error}\nThis is the file of the run that {path} holds: mend it, or use --restart") from None


def _holds_run(path: Path) -> bool:
    """Whether the folder holds a run. Raises UserError if it holds something else."""
    if not path.exists():
        return False
    if not path.is_dir():
        raise UserError(f"{path} is a file; a run needs a folder there: choose another name or out")
    if (path / RUN_FILE).is_file():
        return True
    ours = {".lock", unfinished(path / RUN_FILE).name}
    others = sorted(each.name for each in path.iterdir() if each.name not in ours)
    if others:
        raise UserError(
            f"{path} holds {', '.join(others[:3])} but no {RUN_FILE}: it is no run; choose another name or out"
        )
    return False


def _archive(path: Path) -> Path:
    """Move an earlier run aside, under a name that says when; gives its new place."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    target = path.with_name(f"{path.name}.archived-{stamp}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.archived-{stamp}-{number}")
    path.rename(target)
    release(path)
    return target


def _lock(path: Path) -> None:
    """Hold the folder until this process ends. Raises UserError if another process holds it.

    Some shared file systems have no locks (Lustre without its flock option): there nothing is held.
    """
    if path in _held:
        return
    file = (path / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise UserError(
            f"{path} is being trained by another process ({file.read().strip()}); wait for it, or stop it"
        ) from None
    except OSError:
        file.close()
        return
    _held[path] = file
    with suppress(OSError):  # only for the message above, and a full disk is met by what comes next, which is undone
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"pid {os.getpid()} on {os.uname().nodename}".encode())


def release(path: Path) -> None:
    """Let others have the folder; ending the process does the same."""
    file = _held.pop(path, None)
    if file is not None:
        file.close()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
