"""Finding the checkpoint to go on from: the newest one whose every byte is what was saved.

A flipped bit loads without an error in torch, so nothing is trusted by its name: the manifest proves itself and the
files, and a damaged checkpoint is reported and passed over for the next older one. The files are shared out over the
ranks; a rank proves the file that it will read after a restart in the same layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.checkpoint.folder import CheckpointFolder
from fivefold.checkpoint.manifest import DamageError, Manifest, check_content, check_size
from fivefold.checkpoint.ranks import Ranks
from fivefold.errors import RunError, UserError

OnEvent = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Found:
    """A checkpoint that was proven whole."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """What was passed to `save` as `state`."""
        return self.manifest.state


def newest_whole(folder: CheckpointFolder, ranks: Ranks, on_event: OnEvent) -> tuple[Found | None, list[Path]]:
    """The newest whole checkpoint, and the damaged ones that are newer; a collective call.

    Each damaged one is an event `checkpoint_damaged` (checkpoint, file, reason, using, message) on the first rank.
    Raises RunError if there are checkpoints and all are damaged: to start again would delete them one by one.
    """
    damages: list[tuple[Path, DamageError]] = []
    found = None
    for step, path in ranks.from_first(folder.steps):
        manifest, damage = _prove(path, ranks)
        if manifest is not None:
            found = Found(path, manifest)
            break
        damages.append((path, damage or DamageError("manifest.json", f"is not of step {step}")))
    if found is None and damages:
        listed = "\n".join(f"  {path.name}: {damage}" for path, damage in damages)
        raise RunError(
            f"none of the {len(damages)} checkpoints in {folder.path} is whole:\n{listed}\n"
            "Put a good copy in place, or start again with --restart."
        )
    if found is not None and ranks.first:
        for path, damage in damages:
            on_event("checkpoint_damaged", _damaged_event(path, damage, found))
    return found, [path for path, _ in damages]


def tell(kind: str, fields: dict[str, Any]) -> None:
    """The listener of a command without an event log: a line on standard error."""
    print(f"fivefold: {fields['message']}", file=sys.stderr)


def open_checkpoint(run_folder: Path, step: int | None = None, on_event: OnEvent = tell) -> Found:
    """The checkpoint of a run to read in one process: that of `step`, or the newest whole one.

    Raises UserError if there is none, or if the one asked for is damaged. Those that are passed
    over for being damaged are told to `on_event`, by default on standard error.
    """
    folder = CheckpointFolder(Path(run_folder) / "checkpoints")
    paths = dict(folder.steps())
    if not paths:
        raise UserError(
            f"{run_folder} has no checkpoint in {folder.path.name}/: train first, or name another run folder"
        )
    if step is None:
        found, _ = newest_whole(folder, Ranks(None), on_event)
        assert found is not None, "there are checkpoints, so one is found or an error says that all are damaged"
        return found
    if step not in paths:
        listed = ", ".join(str(known) for known in sorted(paths))
        raise UserError(f"{run_folder} has no checkpoint of step {step}; it has those of step {listed}")
    manifest, damage = _prove(paths[step], Ranks(None))
    if manifest is None:
        raise UserError(
            f"checkpoint {paths[step].name} is damaged: {damage}. Name another step, or none for the newest"
        )
    return Found(paths[step], manifest)


def looks_whole(path: Path) -> bool:
    """Whether manifest and sizes are right: the cheap part of the proof, without reading the data."""
    try:
        for file in Manifest.read(path).files:
            check_size(path, file)
    except (DamageError, UserError):
        return False
    return True


def _prove(path: Path, ranks: Ranks) -> tuple[Manifest | None, DamageError | None]:
    """The manifest if every file is what it says, else None and the first thing that is wrong."""
    manifest, damage = ranks.from_first(lambda: _read_manifest(path))
    if manifest is None:
        return None, damage
    mine = manifest.files[ranks.rank :: ranks.size]
    damage = next((damage for damage in ranks.gather(_first_damage(path, mine)) if damage is not None), None)
    return (manifest, None) if damage is None else (None, damage)


def _read_manifest(path: Path) -> tuple[Manifest | None, DamageError | None]:
    try:
        return Manifest.read(path), None
    except DamageError as damage:
        return None, damage


def _first_damage(path: Path, files: tuple) -> DamageError | None:
    try:
        for file in files:
            check_content(path, file)
    except DamageError as damage:
        return damage
    return None


def _damaged_event(path: Path, damage: DamageError, found: Found) -> dict[str, Any]:
    return {
        "checkpoint": path.name,
        "file": damage.file,
        "reason": damage.reason,
        "using": found.folder.name,
        "message": f"checkpoint {path.name} is damaged: {damage}; using {found.folder.name}",
    }
