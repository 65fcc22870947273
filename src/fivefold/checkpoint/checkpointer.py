"""Saving the state of a run while it trains, and loading it again: what the train loop and its tools call.

`save` copies this rank's shards to CPU memory and returns; a thread writes them, talking to the other ranks over a
group of its own. A save that fails is an event, never an exception in training: the older checkpoints stay, and the
next save is tried.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

import fivefold
from fivefold.checkpoint.failure import reason_for
from fivefold.checkpoint.files import FileRecord
from fivefold.checkpoint.find import Found, OnEvent, looks_whole, newest_whole
from fivefold.checkpoint.folder import CheckpointFolder
from fivefold.checkpoint.load import load_tensors
from fivefold.checkpoint.manifest import Manifest, step_name
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.snapshot import Snapshot, SnapshotPlanner
from fivefold.checkpoint.storage import Writer
from fivefold.errors import UserError

# DCP warns at each call that one process is one process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Checkpointer:
    """The checkpoints of one run in `folder`, of which the newest `keep` stay.

    Made, used and closed by all ranks together. `group` must be able to do CPU collectives and be used for nothing
    else; None makes a gloo group over all processes (or works alone without torch.distributed). `on_event(kind,
    fields)` is called on the group's first rank only, also from the saving thread: `checkpoint_saved`,
    `checkpoint_failed`, `checkpoint_not_removed`, `checkpoint_damaged`, `checkpoint_converted`, each with a `message`.
    """

    def __init__(self, folder: Path, *, keep: int, on_event: OnEvent, group: dist.ProcessGroup | None = None):
        if keep < 1:
            raise ValueError(f"keep is {keep}: at least one checkpoint must stay")
        self._folder = CheckpointFolder(Path(folder))
        self._keep = keep
        self._on_event = on_event
        self._ranks = Ranks.of(group)
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._damaged: set[Path] = set()
        self.saved: int | None = None
        """Step of the last save that this object brought to disk, the same on every rank once `wait` returned."""
        self._ranks.from_first(self._prepare)

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Start saving; the tensors can be changed as soon as this returns. A save still under way is waited for.

        `tensors`: DTensors on any mesh of these ranks, or plain tensors, which count as the same on every rank that
        has them. `state`: anything JSON can hold; the first rank's is kept.
        """
        self.wait()
        started = time.perf_counter()
        text, error = "{}", None
        try:
            text = json.dumps(state)
            self._snapshot.take(tensors)
        except Exception as failure:
            error = failure
        stall_s = time.perf_counter() - started
        arguments = (step, json.loads(text), error, stall_s)
        self._thread = threading.Thread(target=self._write, args=arguments, name=f"checkpoint {step}")
        self._thread.start()

    def wait(self) -> None:
        """Until the save under way is on disk, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def latest(self) -> Found | None:
        """The newest checkpoint that is whole by content, or None if there is none at all; a collective call.

        Damaged ones are reported and passed over. Raises RunError if there are some and all are damaged.
        """
        self.wait()
        found, damaged = newest_whole(self._folder, self._ranks, self._on_event)
        self._damaged.update(damaged)
        return found

    def latest_of(self, folder: Path) -> Found | None:
        """As `latest`, among the checkpoints of another run, which are only read."""
        return newest_whole(CheckpointFolder(folder), self._ranks, self._on_event)[0]

    def load(self, found: Found, tensors: Mapping[str, Tensor], *, allow_unused: bool = False) -> dict[str, Any]:
        """Fill the tensors in place, in whatever layout they are, and return the state; a collective call.

        Values are exact; only where a tensor has another dtype than the stored one they are converted, which is an
        event. Raises UserError if names or shapes do not match; tensors that nobody asks for are an error unless
        `allow_unused`.
        """
        self.wait()
        converted = load_tensors(found, tensors, self._ranks, allow_unused)
        if converted and self._ranks.first:
            message = f"{len(converted)} tensors of {found.folder.name} were converted to another dtype"
            self._on_event("checkpoint_converted", {"step": found.step, "names": converted, "message": message})
        return found.state

    def close(self) -> None:
        """Wait for the save under way."""
        self.wait()

    def _prepare(self) -> None:
        try:
            self._folder.recover()
        except OSError as error:
            raise UserError(
                f"cannot keep checkpoints in {self._folder.path}: {error.strerror}. Make it writable or change `out`"
            ) from error

    def _write(self, step: int, state: dict[str, Any], error: Exception | None, stall_s: float) -> None:
        """The saving thread: DCP plans and gathers, our storage layer writes and commits."""
        started = time.perf_counter()
        manifests: list[Manifest] = []

        def manifest_of(files: list[FileRecord]) -> Manifest:
            manifests.append(Manifest(step, state, tuple(files), fivefold.__version__, torch.__version__))
            return manifests[-1]

        try:
            dcp.save(
                dict(self._snapshot.copies),
                storage_writer=Writer(self._folder, step, self._ranks.rank, manifest_of),
                planner=SnapshotPlanner(self._snapshot, error),
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )
        except (Exception, CheckpointException) as failure:
            self._failed(step, failure)
        else:
            self._saved(step, manifests, {"stall_s": stall_s, "write_s": time.perf_counter() - started})

    def _saved(self, step: int, manifests: list[Manifest], times: dict[str, float]) -> None:
        self.saved = step
        for manifest in manifests:  # the first rank made one, the others none
            fields = {"step": step, "bytes": manifest.bytes, **times}
            gib = manifest.bytes / 2**30
            size = f"{gib:.2f} GiB" if gib >= 1 else f"{gib * 1024:.1f} MiB"
            speed = f"{size} in {times['write_s']:.1f} s"
            self._tell("checkpoint_saved", {**fields, "message": f"saved {step_name(step)}, {speed}"})
            self._remove_old(step)

    def _remove_old(self, step: int) -> None:
        self._damaged.discard(self._folder.path / step_name(step))
        try:
            self._folder.keep_last(self._keep, step, lambda path: path not in self._damaged and looks_whole(path))
        except OSError as error:
            message = f"an old checkpoint could not be deleted: {error}; it is tried again after the next save"
            self._tell("checkpoint_not_removed", {"step": step, "reason": str(error), "message": message})

    def _failed(self, step: int, failure: BaseException) -> None:
        self._snapshot.forget()
        if not self._ranks.first:
            return
        reason = reason_for(failure, self._folder.path)
        try:
            self._folder.abandon(step)
        except OSError as error:
            reason += f"; what was written of it could not be removed either ({error})"
        message = f"{step_name(step)} was not saved: {reason}. Training goes on; older checkpoints are as they were"
        self._tell("checkpoint_failed", {"step": step, "reason": reason, "message": message})

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Report from the saving thread, where an exception has nowhere to go: the listener's disk may be full too."""
        try:
            self._on_event(kind, fields)
        except Exception:
            print(f"fivefold: {fields['message']}; this could not be recorded:", file=sys.stderr)
            traceback.print_exc()
