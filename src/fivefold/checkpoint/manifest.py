"""The manifest: the small file whose presence makes a folder a checkpoint, and which says what the other files hold.

It carries the run's state (step, data cursor, ...) and size and checksum of every other file, and a checksum of itself.
What is not proven by it is not read. `DamageError` is how a file that fails the proof is reported.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from fivefold.checkpoint.files import FileRecord, checksum_of
from fivefold.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"


class DamageError(Exception):
    """A file of a checkpoint does not hold what it must. `file` and `reason` read as one sentence."""

    def __init__(self, file: str, reason: str):
        super().__init__(file, reason)
        self.file = file
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.file} {self.reason}"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. `state` is the caller's, as JSON keeps it."""

    step: int
    state: dict[str, Any]
    files: tuple[FileRecord, ...]
    fivefold: str
    torch: str
    format: int = FORMAT

    def encode(self) -> bytes:
        """The file's bytes."""
        return _seal({**asdict(self), "files": [asdict(file) for file in self.files]})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a checkpoint's folder. Raises `DamageError`, or `UserError` if its format is a newer one."""
        raw = _read(folder / MANIFEST)
        try:
            body = json.loads(raw)
            body.pop("xxh3")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise DamageError(MANIFEST, f"is cut short or overwritten ({len(raw):,} bytes: {error})") from error
        if _seal(body) != raw:
            raise DamageError(MANIFEST, "does not match its own checksum")
        if body["format"] != FORMAT:
            raise UserError(
                f"{folder} has checkpoint format {body['format']}, this fivefold reads format {FORMAT}: "
                f"use the fivefold that wrote it ({body.get('fivefold')}) or a newer one"
            )
        manifest = cls(**{**body, "files": tuple(FileRecord(**file) for file in body["files"])})
        if not folder.name.endswith(step_name(manifest.step)):
            raise DamageError(MANIFEST, f"is of step {manifest.step}, in a folder of another step")
        return manifest

    def record(self, name: str) -> FileRecord:
        """What the manifest says of a file."""
        return next(file for file in self.files if file.name == name)

    @property
    def bytes(self) -> int:
        """Size of all files but the manifest."""
        return sum(file.bytes for file in self.files)


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step-{step:08d}"


def check_size(folder: Path, file: FileRecord) -> None:
    """Raise `DamageError` unless the file is there with its size."""
    try:
        size = (folder / file.name).stat().st_size
    except FileNotFoundError:
        raise DamageError(file.name, "is missing") from None
    except OSError as error:
        raise DamageError(file.name, f"cannot be read ({error.strerror})") from error
    if size != file.bytes:
        raise DamageError(file.name, f"has {size:,} bytes, the manifest says {file.bytes:,}")


def check_content(folder: Path, file: FileRecord) -> None:
    """Raise `DamageError` unless the file holds exactly what the manifest says. Reads all of it."""
    check_size(folder, file)
    try:
        found = checksum_of(folder / file.name)
    except OSError as error:
        raise DamageError(file.name, f"cannot be read ({error.strerror})") from error
    if found != file.xxh3:
        raise DamageError(file.name, f"has checksum {found}, the manifest says {file.xxh3}")


def _seal(body: dict[str, Any]) -> bytes:
    """JSON with a checksum of itself. One object has one encoding: any changed byte shows when it is encoded again."""
    checksum = xxhash.xxh3_64_hexdigest(json.dumps(body).encode())
    return (json.dumps({**body, "xxh3": checksum}, indent=1) + "\n").encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DamageError(path.name, "is missing") from None
    except OSError as error:
        raise DamageError(path.name, f"cannot be read ({error.strerror})") from error
