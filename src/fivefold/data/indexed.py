"""The .idx file of a .bin/.idx pair, the format that Megatron-LM, NeMo and others read and write.

Only the layout of the bytes is known here: reading it (memory-mapped, checked) and writing it. What the tokens mean
is `tokens.py`'s. Little-endian without padding, so the arrays may lie unaligned in the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fivefold.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, length of the document index
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}
CHUNK = 1 << 20  # entries of an array that are looked at together


@dataclass(frozen=True)
class Index:
    """The contents of an .idx file; the arrays are views of the mapped file."""

    dtype: np.dtype
    lengths: np.ndarray
    """(S,) int32: tokens of each sequence."""
    offsets: np.ndarray
    """(S,) int64: where each sequence begins in the .bin file, in bytes."""
    boundaries: np.ndarray
    """(D,) int64: where each document begins, as sequence numbers; the first is 0, the last S."""
    tokens: int


def read_index(path: Path, bin_size: int) -> Index:
    """Map and check `path`, whose .bin file has `bin_size` bytes. Raises UserError naming the file and the numbers."""
    size = path.stat().st_size
    if size < HEADER.size:
        raise UserError(f"{path} is cut short: {size} bytes, but the header alone has {HEADER.size}")
    data = np.memmap(path, dtype=np.uint8, mode="r")
    magic, version, code, sequences, documents = HEADER.unpack(data[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise UserError(f"{path} is no .idx file: it begins with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise UserError(f"{path} has version {version}; only version {VERSION} is known")
    if code not in DTYPES:
        raise UserError(f"{path} has the unknown dtype code {code}; known are {', '.join(map(str, DTYPES))}")
    dtype = np.dtype(DTYPES[code])
    if dtype.kind not in "iu":
        raise UserError(f"{path} holds {dtype.name} numbers (dtype code {code}); token ids are integers")
    _check_size(path, size, sequences, documents, data)
    at_offsets = HEADER.size + 4 * sequences
    at_boundaries = at_offsets + 8 * sequences
    lengths = data[HEADER.size : at_offsets].view("<i4")
    offsets = data[at_offsets:at_boundaries].view("<i8")
    boundaries = data[at_boundaries : at_boundaries + 8 * documents].view("<i8")
    tokens = _check_sequences(path, lengths, offsets, dtype.itemsize)
    _check_boundaries(path, boundaries, sequences)
    if tokens * dtype.itemsize != bin_size:
        raise UserError(
            f"{path.with_suffix('.bin')} has {bin_size} bytes, but {path} lists {tokens} tokens of {dtype.itemsize} "
            f"bytes, which are {tokens * dtype.itemsize}: one of them is cut short or belongs to another set"
        )
    return Index(dtype, lengths, offsets, boundaries, tokens)


def _check_size(path: Path, size: int, sequences: int, documents: int, data: np.ndarray) -> None:
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size == expected + sequences and data[expected:].any():
        raise UserError(f"{path} is a multimodal set: some sequences have another mode than text")
    if size not in (expected, expected + sequences):
        state = "is cut short" if size < expected else "is too long"
        raise UserError(
            f"{path} {state}: {size} bytes, but {sequences} sequences and a document index of {documents} take "
            f"{expected}"
        )


def _check_sequences(path: Path, lengths: np.ndarray, offsets: np.ndarray, itemsize: int) -> int:
    """The total of the lengths, after a check that each sequence begins where the one before ends."""
    total = 0
    for first in range(0, len(lengths), CHUNK):
        part = lengths[first : first + CHUNK].astype(np.int64)
        if part.min() < 0:
            bad = first + int(part.argmin())
            raise UserError(f"{path}: sequence {bad} has the length {part.min()}")
        ends = total + np.cumsum(part)
        expected = (ends - part) * itemsize
        wrong = offsets[first : first + CHUNK] != expected
        if wrong.any():
            at = int(wrong.argmax())
            raise UserError(
                f"{path}: sequence {first + at} begins at byte {offsets[first + at]}, but the one before ends at byte "
                f"{expected[at]}; only sets whose sequences lie one after the other can be read"
            )
        total = int(ends[-1])
    return total


def _check_boundaries(path: Path, boundaries: np.ndarray, sequences: int) -> None:
    if len(boundaries) == 0 or boundaries[0] != 0 or boundaries[-1] != sequences:
        found = f"runs from {boundaries[0]} to {boundaries[-1]}" if len(boundaries) else "is empty"
        raise UserError(f"{path}: the document index {found} instead of from 0 to {sequences}, the number of sequences")
    for first in range(0, len(boundaries) - 1, CHUNK):
        part = boundaries[first : first + CHUNK + 1].astype(np.int64)
        falls = np.diff(part) < 0
        if falls.any():
            at = int(falls.argmax())
            raise UserError(
                f"{path}: the document index falls from {part[at]} to {part[at + 1]} at entry {first + at + 1}"
            )


def write_index(file: BinaryIO, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Write the .idx of a set with one sequence a document; `lengths` (int32) may be a mapped file of any size."""
    count = len(lengths)
    file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], count, count + 1))
    for first in range(0, count, CHUNK):
        file.write(lengths[first : first + CHUNK].astype("<i4").tobytes())
    offset = 0
    for first in range(0, count, CHUNK):
        bytes_each = lengths[first : first + CHUNK].astype("<i8") * dtype.itemsize
        ends = offset + np.cumsum(bytes_each)
        file.write((ends - bytes_each).astype("<i8").tobytes())
        offset = int(ends[-1])
    for first in range(0, count + 1, CHUNK):
        file.write(np.arange(first, min(first + CHUNK, count + 1), dtype="<i8").tobytes())
