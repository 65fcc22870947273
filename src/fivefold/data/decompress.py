"""The bytes of an input file, .gz and .zst decompressed on the way; a file that is cut short is an error."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from fivefold.errors import UserError

BLOCK = 1 << 20
"""Bytes that a block of input aims at."""
COMPRESSED = (".gz", ".zst")


def read_decompressed(path: str) -> Iterator[bytes]:
    """The contents of a file, .gz and .zst decompressed, in chunks."""
    for chunk, _ in read_counted(path):
        yield chunk


def read_counted(path: str) -> Iterator[tuple[bytes, int]]:
    """As `read_decompressed`, with the bytes of the file read so far. Raises UserError for a file cut short."""
    with Path(path).open("rb") as raw:
        try:
            for chunk in decompressed(path, raw):
                yield chunk, raw.tell()
        except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
            raise UserError(f"{path} is cut short or damaged after {raw.tell()} of its bytes: {error}") from None


def decompressed(path: str, raw: BinaryIO) -> Iterator[bytes]:
    """Chunks of about BLOCK bytes of an open file's contents."""
    if path.endswith(".gz"):
        with gzip.GzipFile(fileobj=raw) as file:
            while chunk := file.read(BLOCK):
                yield chunk
    elif path.endswith(".zst"):
        yield from zstd_chunks(raw)
    else:
        while chunk := raw.read(BLOCK):
            yield chunk


def zstd_chunks(raw: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames of a zstd file. The library's readers pass over a cut end in silence, this does not."""
    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = context.decompressobj()
    fresh = True
    while data := raw.read(BLOCK // 4):
        while data:
            if out := frame.decompress(data):
                yield out
            fresh = False
            data = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame, fresh = context.decompressobj(), True
    if not fresh:
        raise EOFError("the last zstd frame has no end")
