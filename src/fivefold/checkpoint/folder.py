"""The folder of a run's checkpoints: which names mean what, and the order of renames that makes a save all or nothing.

    step-00000100            a checkpoint, whole when it got this name
    .saving-step-00000100    being written
    .replaced-step-00000100  the one that a new save of the same step is just taking the place of
    .removed-step-00000100   being deleted

Only one process changes the folder: the first rank of the run. Anyone may read it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from fivefold.checkpoint.files import remove_tree
from fivefold.checkpoint.manifest import step_name
from fivefold.durable import sync

_WHOLE = re.compile(r"(\.replaced-)?step-(\d{8,})")


class CheckpointFolder:
    """`checkpoints/` of a run."""

    def __init__(self, path: Path):
        self.path = path

    def steps(self) -> list[tuple[int, Path]]:
        """The checkpoints by step, newest first. A replaced one counts only while its successor is not in place."""
        found: dict[int, Path] = {}
        for path in sorted(self.path.iterdir(), reverse=True) if self.path.is_dir() else []:
            if (match := _WHOLE.fullmatch(path.name)) and path.is_dir():
                found.setdefault(int(match[2]), path)
        return sorted(found.items(), reverse=True)

    def recover(self) -> None:
        """Make the folder if need be, and clear away what killed processes and failed saves left behind."""
        self.path.mkdir(parents=True, exist_ok=True)
        sync(self.path)
        for path in sorted(self.path.glob(".replaced-step-*")):
            successor = self.path / path.name.removeprefix(".replaced-")
            if successor.exists():
                self.remove(path)
            else:
                path.rename(successor)
        for pattern in (".saving-step-*", ".removed-step-*"):
            for path in self.path.glob(pattern):
                remove_tree(path)

    def saving(self, step: int) -> Path:
        """Where a save of this step is written until it is whole."""
        return self.path / f".saving-{step_name(step)}"

    def begin(self, step: int) -> None:
        """An empty folder to save into."""
        self.recover()
        self.saving(step).mkdir()

    def commit(self, step: int) -> Path:
        """Give what was saved its name. At every moment the old or the new one of this step can be found."""
        whole, replaced = self.path / step_name(step), self.path / f".replaced-{step_name(step)}"
        sync(self.saving(step))
        if whole.exists():
            remove_tree(replaced)
            whole.rename(replaced)
        self.saving(step).rename(whole)
        sync(self.path)
        if replaced.exists():
            self.remove(replaced)
        return whole

    def abandon(self, step: int) -> None:
        """Undo a save that failed. One that has its name already stays: whole, but not sure to survive a power cut."""
        whole, replaced = self.path / step_name(step), self.path / f".replaced-{step_name(step)}"
        if replaced.exists() and not whole.exists():
            replaced.rename(whole)
        remove_tree(self.saving(step))

    def remove(self, path: Path) -> None:
        """Delete a checkpoint: it loses its name first, so one that is half deleted is never taken for whole."""
        removed = self.path / f".removed-{path.name.removeprefix('.replaced-')}"
        remove_tree(removed)
        path.rename(removed)
        remove_tree(removed)

    def keep_last(self, keep: int, newest: int, sound: Callable[[Path], bool]) -> None:
        """Delete all but the `keep` newest sound ones up to step `newest`, the one just saved.

        Later steps are of a past that a rewind has left: after a crash they would be taken for the newest. Damaged
        ones do not count as kept.
        """
        kept = 0
        for step, path in self.steps():
            if step > newest or kept >= keep:
                self.remove(path)
            else:
                kept += step == newest or sound(path)
