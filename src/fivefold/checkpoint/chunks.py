"""Reading stored chunks: the one place where tensor bytes come from disk, and where they are proven.

A chunk has a checksum for each block, so a slice costs its own blocks and not the chunk. One buffer serves all reads:
fresh memory for each would cost more in page faults than the read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from torch import Size, Tensor

from fivefold.checkpoint.files import BLOCK, read_block
from fivefold.checkpoint.manifest import DamageError
from fivefold.checkpoint.tensors import TENSORS, Place


class ChunkReader:
    """Reads from the files of one checkpoint's folder. What a read returns is overwritten by the next."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def box(self, place: Place, dtype: torch.dtype, sizes: Size, offsets: Size, lengths: Size) -> Tensor:
        """A box of a chunk of shape `sizes`: from `offsets`, `lengths` elements in each dimension, at least one in all.

        A CPU tensor in the stored dtype. Reads from the box's first to its last element. Raises `DamageError`.
        """
        strides = torch.empty(sizes, device="meta").stride()
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        last = first + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
        start = first * dtype.itemsize // BLOCK * BLOCK
        flat = self._bytes(place, start, (last + 1) * dtype.itemsize).view(dtype)
        return flat.as_strided(lengths, strides, first - start // dtype.itemsize)

    def _bytes(self, place: Place, start: int, end: int) -> Tensor:
        """Bytes of a chunk from `start`, the beginning of a block, to the end of the block with byte `end - 1`."""
        end = min(-(-end // BLOCK) * BLOCK, place.bytes)
        if len(self._buffer) < end - start:
            self._buffer = torch.empty(end - start, dtype=torch.uint8)
        data = self._buffer[: end - start]
        view = data.numpy().data
        with _opened(self.folder / place.file) as descriptor:
            for offset in range(start, end, BLOCK):
                block = view[offset - start : offset - start + BLOCK]
                count = read_block(descriptor, block, place.start + offset)
                self._prove(block[:count], place, offset)
        return data

    def _prove(self, block: memoryview, place: Place, offset: int) -> None:
        found, wanted = xxhash.xxh3_64_hexdigest(block), place.xxh3[offset // BLOCK]
        if found != wanted:
            where = f"in the {len(block):,} bytes from {place.start + offset:,}"
            raise DamageError(place.file, f"has checksum {found} {where}, {TENSORS} says {wanted}")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DamageError(path.name, f"cannot be read ({error.strerror})") from error
