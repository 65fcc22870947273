"""Files that are either wholly on the disk or not there under their name, and their checksums.

Everything that a checkpoint does to the disk goes through the `os` functions used here, one system call a line, so a
test can stop a save at each of them. Checksums are xxh3-64, in hexadecimal: what `xxhsum -H3` prints.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import xxhash

BLOCK = 16 << 20
"""Bytes read, written and checksummed at once. A multiple of every element size, so a block holds whole elements."""
ALIGNMENT = 64
"""Each tensor starts at a multiple of this many bytes."""


@dataclass(frozen=True)
class FileRecord:
    """What a file must hold: its size in bytes and the checksum of all of them."""

    name: str
    bytes: int
    xxh3: str


class NewFile:
    """A file that must not exist yet, written front to back and hashed on the way; on disk when the block is left."""

    def __init__(self, path: Path):
        self.path = path
        self.size = 0
        self._hash = xxhash.xxh3_64()

    def __enter__(self) -> NewFile:
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        return self

    def write(self, data: memoryview) -> list[str]:
        """Append the bytes; returns the checksum of each `BLOCK` of them. Raises OSError with the file's name."""
        checksums = []
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            self._hash.update(block)
            checksums.append(xxhash.xxh3_64_hexdigest(block))
            self._write_all(block)
        return checksums

    def align(self) -> None:
        """Append zeros up to the next multiple of `ALIGNMENT`."""
        self.write(memoryview(bytes(-self.size % ALIGNMENT)))

    @property
    def record(self) -> FileRecord:
        """Name, size and checksum of what was written so far."""
        return FileRecord(self.path.name, self.size, self._hash.hexdigest())

    def _write_all(self, block: memoryview) -> None:
        try:
            while len(block):
                written = os.write(self._descriptor, block)
                self.size += written
                block = block[written:]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        except OSError as failure:
            raise OSError(failure.errno, failure.strerror, str(self.path)) from failure
        finally:
            os.close(self._descriptor)


def write_file(path: Path, data: bytes) -> FileRecord:
    """A new file with these bytes, on disk on return."""
    with NewFile(path) as file:
        file.write(memoryview(data))
    return file.record


def remove_tree(path: Path) -> None:
    """Delete a folder with all that is in it; one that is not there is fine."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def read_block(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill the buffer from a position in the file; returns the bytes read, fewer only at the file's end."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def checksum_of(path: Path) -> str:
    """Checksum of a whole file, in one pass and one block of memory."""
    digest = xxhash.xxh3_64()
    buffer = memoryview(bytearray(BLOCK))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        offset = 0
        while count := read_block(descriptor, buffer, offset):
            digest.update(buffer[:count])
            offset += count
    finally:
        os.close(descriptor)
    return digest.hexdigest()
