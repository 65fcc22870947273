"""Making what was written survive a power cut. Imports nothing of ours.

A file's contents, and the names in a folder, are on the disk only after an fsync of that file or folder; a rename puts
a whole file in a place, or nothing.
"""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Put a file's contents, or the names in a folder, on the disk. Raises OSError that names the path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Put a flat folder's files, and their names, on the disk."""
    for path in (*folder.iterdir(), folder):
        sync(path)


def unfinished(path: Path) -> Path:
    """The name of a file while it is being written."""
    return path.with_name(f".{path.name}.writing")


def replace_file(path: Path, text: str) -> None:
    """Write a small file so that a reader finds the old or the new text, whole, at any moment."""
    temporary = unfinished(path)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)
