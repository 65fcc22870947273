"""A run that a user names on the command line: by its folder, or by its name in `runs`. Imports no torch."""

from __future__ import annotations

from pathlib import Path

RUNS = Path("runs")
"""Where runs lie, unless a run file says otherwise."""


def run_folder(text: str, holds: str = "") -> Path | None:
    """The folder of the run that `text` names, if it is there and has the file that it must hold."""
    found = (each for each in (Path(text), RUNS / text) if each.is_dir() and (not holds or (each / holds).is_file()))
    return next(found, None) if text else None
