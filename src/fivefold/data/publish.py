"""Folders that appear whole or not at all: written under a hidden name, locked, then renamed.

`Workshop` is the hidden folder `.NAME.building` beside the output. Its lock ends with the process, however that ends,
so what a killed build left is recognized and removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from fivefold.durable import sync, sync_tree
from fivefold.errors import UserError

OLD = "old"  # what was at the targets before


class Workshop:
    """The hidden folder in which `out` is prepared; use it as a context manager."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.path = out.parent / f".{out.name}.building"
        self._lock = -1

    def __enter__(self) -> Workshop:
        """Take the folder and empty it. Raises UserError if a living process holds it, or if it cannot be made."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while self._lock < 0:
                self.path.mkdir(exist_ok=True)
                self._lock = self._take()
        except OSError as error:
            raise UserError(f"cannot write {self.out}: {error.strerror or error}") from error
        self._recover()
        for leftover in self.path.iterdir():
            remove(leftover)
        return self

    def _recover(self) -> None:
        """Undo an exchange that a kill cut short: it is complete only if `out` is there and its predecessor is here."""
        old = self.path / OLD
        if not old.is_dir() or (self.out.exists() and (old / self.out.name).exists()):
            return
        for folder in old.iterdir():
            target = self.out.parent / folder.name
            if target.exists():
                remove(target)
            folder.rename(target)

    def _take(self) -> int:
        """A locked descriptor of the folder, or -1 if another process removed the folder meanwhile."""
        lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UserError(
                f"another process is building {self.out} now (it holds {self.path}); wait for it or stop it"
            ) from None
        try:
            if os.path.samestat(os.fstat(lock), self.path.stat()):
                return lock
        except FileNotFoundError:
            pass
        os.close(lock)
        return -1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def publish(self, made: dict[Path, Path | None]) -> None:
        """Put each prepared folder in the place of its target, or take the target away where none was prepared.

        Targets lie beside `out`, which comes last: it is there only when all is done. If something fails on the way,
        what was there before is put back.
        """
        (self.path / OLD).mkdir()
        for folder in filter(None, made.values()):
            sync_tree(folder)
        moved: list[tuple[Path, Path]] = []
        try:
            for target in made:
                if target.exists():
                    self._move(target, self.path / OLD / target.name, moved)
            for target in sorted(made, key=lambda each: each == self.out):
                if prepared := made[target]:
                    self._move(prepared, target, moved)
        except BaseException:
            for source, destination in reversed(moved):
                destination.rename(source)
            raise
        sync(self.out.parent)

    def _move(self, source: Path, destination: Path, moved: list[tuple[Path, Path]]) -> None:
        source.rename(destination)
        moved.append((source, destination))


def remove(path: Path) -> None:
    """Remove a file or a whole folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
