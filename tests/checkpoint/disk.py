"""Standing between a save and the disk: a system call that changes it can be counted, failed or made the last.

Children are killed by `os._exit` in the midst of a save: no handler runs, no buffer is flushed, as with SIGKILL.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

CALLS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")
Act = Callable[[int, str, tuple], None]


class Disk:
    """Calls `act(number, name, arguments)` before each system call that changes the disk, numbered from 1.

    Where `act` raises, the call fails. Knows which files were written and not yet synced.
    """

    def __init__(self, act: Act):
        self.act = act
        self.count = 0
        self.unsynced: dict[int, None] = {}
        self._real = {name: getattr(os, name) for name in CALLS}

    def __enter__(self) -> Disk:
        for name in CALLS:
            setattr(os, name, self._watched(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, call in self._real.items():
            setattr(os, name, call)

    def write_half(self, descriptor: int, data: memoryview) -> None:
        """What a process leaves that dies within a write."""
        self._real["write"](descriptor, data[: len(data) // 2])

    def lose_unsynced(self) -> None:
        """What a power cut leaves: a file that was not synced may be empty."""
        for descriptor in self.unsynced:
            os.ftruncate(descriptor, 0)

    def _watched(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*arguments: Any, **keywords: Any) -> Any:
            if name == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **keywords)
            self.count += 1
            self.act(self.count, name, arguments)
            if name == "write":
                self.unsynced[arguments[0]] = None
            if name == "fsync":
                self.unsynced.pop(arguments[0], None)
            return real(*arguments, **keywords)

        return call
