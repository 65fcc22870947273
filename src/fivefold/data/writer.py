"""Writing a token set: a stream of documents goes in, tokens.bin, tokens.idx and dataset.json come out.

Memory does not grow with the set: lengths go to a file of their own until the .idx is written. The folder is complete
only after `close`: `publish.py` makes it appear at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from fivefold.data.indexed import write_index
from fivefold.data.token_bytes import token_bytes
from fivefold.data.tokens import PAIR, SIDECAR, checksum
from fivefold.errors import UserError

FORMAT = 1
MAX_DOCUMENT = 2**31 - 1  # the index counts a sequence's tokens in int32


def token_dtype(vocab: int) -> np.dtype:
    """The type of the tokens on disk: uint16 or int32, as wide as `token_bytes` says."""
    return np.dtype({2: "<u2", 4: "<i4"}[token_bytes(vocab)])


class TokenWriter:
    """Streams documents into `folder`. Each document's tokens include its end-of-document token."""

    def __init__(self, folder: Path, vocab: int, eod: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.vocab, self.eod = folder, vocab, eod
        self.dtype = token_dtype(vocab)
        self.tokens = self.documents = self.text_bytes = 0
        self.max_token = -1
        self._digest = xxhash.xxh3_64()
        self._bin = (folder / f"{PAIR}.bin").open("wb")
        self._lengths = (folder / "lengths.tmp").open("wb")

    def write(self, tokens: np.ndarray, lengths: np.ndarray, text_bytes: int = 0) -> None:
        """Append documents: their tokens joined, and each one's length. Raises UserError for one too long to index."""
        if len(lengths) == 0:
            return
        if int(lengths.max()) > MAX_DOCUMENT:
            raise UserError(
                f"a document of {lengths.max()} tokens is longer than the format allows ({MAX_DOCUMENT}); split it"
            )
        data = np.ascontiguousarray(tokens, dtype=self.dtype)
        raw = data.data.cast("B")
        self._bin.write(raw)
        self._digest.update(raw)
        self._lengths.write(lengths.astype("<i4").tobytes())
        self.tokens += len(data)
        self.documents += len(lengths)
        self.text_bytes += text_bytes
        self.max_token = max(self.max_token, int(data.max()))

    def close(self, **more: Any) -> dict[str, Any]:
        """Write the index and dataset.json (with the fields `more`); returns dataset.json's contents."""
        self._bin.close()
        self._lengths.close()
        spool = self.folder / "lengths.tmp"
        lengths = np.memmap(spool, dtype="<i4", mode="r") if self.documents else np.empty(0, "<i4")
        index = self.folder / f"{PAIR}.idx"
        with index.open("wb") as file:
            write_index(file, lengths, self.dtype)
        del lengths
        spool.unlink()
        meta = {
            "format": FORMAT,
            "tokens": self.tokens,
            "documents": self.documents,
            "dtype": self.dtype.name,
            "vocab": self.vocab,
            "eod": self.eod,
            "max_token": self.max_token,
            "text_bytes": self.text_bytes,
            "checksums": {f"{PAIR}.bin": self._digest.hexdigest(), f"{PAIR}.idx": checksum(index)},
            **more,
        }
        (self.folder / SIDECAR).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return meta

    def abandon(self) -> None:
        """Close the files without finishing the set."""
        self._bin.close()
        self._lengths.close()
