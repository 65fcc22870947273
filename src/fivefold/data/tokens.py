"""A token set on disk: tokens.bin, tokens.idx and, beside sets of our own, dataset.json and the tokenizer.

Reading is memory-mapped and never copies more than was asked for. Pairs that other tools wrote are read too: any
integer type, several sequences a document, empty documents. Imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fivefold.data.indexed import CHUNK, Index, read_index
from fivefold.data.source import TokenSource
from fivefold.errors import UserError

PAIR = "tokens"  # stem of the pair inside a folder that we wrote
SIDECAR = "dataset.json"
TOKENIZER = "tokenizer.json"
SIDECAR_TYPES = {"tokens": int, "documents": int, "max_token": int, "eod": int | None, "checksums": dict}


class TokenSet(TokenSource):
    """The tokens of a .bin/.idx pair."""

    def __init__(self, stem: Path, index: Index, meta: dict[str, Any] | None) -> None:
        self.name = str(stem)
        self.bin, self.idx = Path(f"{stem}.bin"), Path(f"{stem}.idx")
        self.index = index
        self.tokens = index.tokens
        self.meta = meta
        """The contents of dataset.json; None for a pair that another tool wrote."""
        self.eod = meta["eod"] if meta else None
        self.starts = document_starts(index)
        self._data = np.memmap(self.bin, dtype=index.dtype, mode="r") if self.tokens else np.empty(0, index.dtype)

    @classmethod
    def open(cls, path: str | Path) -> TokenSet:
        """Open a folder written by `fivefold data build`, or the common prefix of a .bin/.idx pair.

        Raises UserError, naming the file and the numbers, if anything is missing, cut short or contradicts itself.
        """
        path = Path(path)
        stem = path / PAIR if path.is_dir() else path.with_suffix("") if path.suffix in (".bin", ".idx") else path
        bin_file, idx_file = Path(f"{stem}.bin"), Path(f"{stem}.idx")
        missing = [str(file) for file in (bin_file, idx_file) if not file.is_file()]
        if missing:
            raise UserError(
                f"no token set at {path}: {' and '.join(missing)} not found; give a folder that `fivefold data build` "
                "wrote, or the common prefix of a .bin/.idx pair"
            )
        index = read_index(idx_file, bin_file.stat().st_size)
        meta = read_sidecar(path / SIDECAR, index) if path.is_dir() else None
        return cls(stem, index, meta)

    @property
    def tokenizer(self) -> Path | None:
        """The folder from which `Tokenizer.load` reads, if the set carries its tokenizer."""
        return self.bin.parent if self.meta and (self.bin.parent / TOKENIZER).is_file() else None

    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) in the file's own integer type: a view of the mapped tokens `start` to `start + count - 1`."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"{self.name}: tokens {start} to {start + count - 1} of {self.tokens}")
        return self._data[start : start + count]

    def check_vocabulary(self, vocab: int) -> None:
        """As for every source; sets of our own answer from dataset.json without reading the tokens."""
        if self.meta is None or self.meta["max_token"] >= vocab:
            super().check_vocabulary(vocab)

    def verify(self) -> None:
        """Read both files and compare with the checksums in dataset.json. Raises UserError naming the damaged file."""
        for file in (self.bin, self.idx):
            expected = (self.meta or {}).get("checksums", {}).get(file.name)
            if expected is not None and (found := checksum(file)) != expected:
                raise UserError(
                    f"{file} is damaged: its xxh3 is {found}, but {SIDECAR} says {expected}; use --overwrite"
                )


class MappedStarts:
    """Where each document begins, in tokens, computed from the mapped index when asked: no memory a document."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def __len__(self) -> int:
        return len(self._index.boundaries) - 1

    def __getitem__(self, which: Any) -> np.ndarray:
        return self._index.offsets[self._index.boundaries[:-1][which]] // self._index.dtype.itemsize


def document_starts(index: Index) -> MappedStarts | np.ndarray:
    """Starts of the documents that hold at least one token: mapped, or an array if empty ones must be left out."""
    mapped = MappedStarts(index)
    has_empty = False
    last = -1
    for first in range(0, len(mapped), CHUNK):
        sequences = index.boundaries[first : min(first + CHUNK, len(mapped))]
        if sequences[-1] >= len(index.lengths):
            has_empty = True
            break
        starts = index.offsets[sequences] // index.dtype.itemsize
        has_empty |= bool(starts[0] == last or (np.diff(starts) == 0).any() or starts[-1] >= index.tokens)
        last = int(starts[-1])
    if not has_empty:
        return mapped
    ends = np.append(index.offsets.astype(np.int64) // index.dtype.itemsize, index.tokens)
    starts = ends[index.boundaries]
    return np.unique(starts[:-1][starts[:-1] < index.tokens])


def read_sidecar(path: Path, index: Index) -> dict[str, Any] | None:
    """dataset.json, or None where there is none. Raises UserError if it does not belong to this pair."""
    if not path.is_file():
        return None
    try:
        meta = {"checksums": {}} | json.loads(path.read_text(encoding="utf-8"))
        wrong = [f"{key} is {meta[key]!r}" for key, kind in SIDECAR_TYPES.items() if not isinstance(meta[key], kind)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); build the data again") from None
    if wrong:
        raise UserError(f"{path} is damaged ({', '.join(wrong)}); build the data again")
    stated, found = (meta["tokens"], meta["documents"]), (index.tokens, len(index.boundaries) - 1)
    if stated != found:
        raise UserError(
            f"{path} speaks of {stated[0]} tokens in {stated[1]} documents, but the .idx beside it of {found[0]} in "
            f"{found[1]}"
        )
    return meta


def checksum(path: Path) -> str:
    """xxh3 (64 bits, hexadecimal) of a file's bytes."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
