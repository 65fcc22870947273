"""Files of JSON lines that survive a crash and a full disk: the ground under metrics.jsonl and events.jsonl.

A line is handed to the operating system at once, so a killed process loses none. A write that fails leaves the file as
it was; its lines wait in memory and go out with the next write that succeeds. JSON has no NaN and no infinities: they
stand as the strings "NaN", "Infinity" and "-Infinity", and `read_lines` gives them back as floats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.durable import sync

NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(fields: Mapping[str, Any]) -> str:
    """`fields` as one line of valid JSON without its newline; floats in full precision, paths and the like as text."""
    return json.dumps(_without_non_finite(fields), ensure_ascii=False, allow_nan=False, default=str)


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; a line that is torn or no JSON object is left out. No file: nothing."""
    path = Path(path)
    if not path.exists():
        return
    for line in _lines(path):
        fields = parse(line)
        if fields is not None:
            yield {key: _as_number(value) for key, value in fields.items()}


def parse(line: bytes) -> dict[str, Any] | None:
    """The object on a line, or None if the line is torn or holds something else."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


class LineFile:
    """A file of JSON lines, repaired at opening and then appended to.

    At opening only the lines that `keep` accepts stay, and the torn last line of a killed process goes. If that changes
    anything, the file is rewritten under a temporary name, synced and renamed. Raises OSError where it cannot.
    """

    def __init__(self, path: str | Path, keep: Callable[[dict[str, Any]], bool]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.last = _repair(self.path, keep)
        """The newest line as it was read or written; None in an empty file."""
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._good = os.fstat(self._descriptor).st_size
        self._waiting = b""

    def append(self, fields: dict[str, Any]) -> None:
        """Write one line. Raises OSError if the disk refuses; the line is then kept for the next call."""
        self.last = dict(fields)
        self._write(to_json(fields).encode() + b"\n")

    def extend(self, fields: dict[str, Any]) -> None:
        """Add keys to the newest line, in place: the brace that closes it moves. Raises as `append`."""
        assert self.last, "only a line that is there can be extended"
        self.last |= fields
        addition = b", " + to_json(fields)[1:].encode() + b"\n"
        if self._waiting:
            self._waiting = self._waiting[: -len(b"}\n")]
        else:
            self._good -= len(b"}\n")
        self._write(addition)

    def sync(self) -> None:
        """Write what waits and return when the disk has everything. Raises OSError."""
        self._write(b"")
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Sync and close; a second call does nothing. Raises OSError, but the file is closed."""
        if self._descriptor < 0:
            return
        try:
            self.sync()
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes) -> None:
        """Everything that waits and `data` at the end of the good part; cut back to that part if the disk refuses."""
        self._waiting += data
        done = 0
        try:
            while done < len(self._waiting):
                done += os.pwrite(self._descriptor, self._waiting[done:], self._good + done)
        except OSError:
            os.ftruncate(self._descriptor, self._good)
            raise
        self._good += done
        self._waiting = b""


def _repair(path: Path, keep: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    """Leave only whole lines that `keep` accepts in the file at `path`; returns the last of them."""
    if not path.exists():
        return None
    last, changed = None, False
    for line in _lines(path):
        kept = _kept(line, keep)
        changed |= kept is None or line != line.strip() + b"\n"
        last = kept or last
    if changed:
        _rewrite(path, keep)
    return last


def _rewrite(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as new:
            new.writelines(line.strip() + b"\n" for line in _lines(path) if _kept(line, keep) is not None)
            new.flush()
            os.fsync(new.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file


def _kept(line: bytes, keep: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
    fields = parse(line)
    return fields if fields is not None and keep(fields) else None


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(item) for item in value]
    return value


def _as_number(value: Any) -> Any:
    return NON_FINITE.get(value, value) if isinstance(value, str) else value
