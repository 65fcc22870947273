"""events.jsonl: what happened to a run beside its steps (started, resumed, saved, a sink that failed), with the time.

Append-only over all restarts of a run, so it is the history that a person reads when something went wrong.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fivefold.observe.lines import LineFile, read_lines

CPU = "CPU"
"""The device that a start reports where there is no GPU; of a GPU it is the driver's name."""


class EventsFile:
    """The events of the run at `path`; what earlier starts wrote stays. Raises OSError where it cannot be written."""

    def __init__(self, path: str | Path) -> None:
        self._file = LineFile(path, keep=lambda fields: True)

    def write(self, kind: str, **fields: Any) -> None:
        """One line: the time (UTC, ISO 8601), the kind, and the fields in their order."""
        self._file.append({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "kind": kind, **fields})

    def sync(self) -> None:
        """Return when all lines are on the disk."""
        self._file.sync()

    def close(self) -> None:
        """Sync and close."""
        self._file.close()


def read_events(path: str | Path) -> list[dict[str, Any]]:
    """The lines of an events.jsonl, oldest first; a torn last line is left out."""
    return list(read_lines(path))
