"""What the loader reads from: a long row of tokens that knows where its documents begin.

`TokenSource` is the base of our own token sets and of sources that others register under the entry point
`fivefold.sources`; `open_source` chooses. Imports no torch.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np

from fivefold import plugins
from fivefold.errors import UserError

REGISTERED = re.compile(r"([A-Za-z_][\w-]+):(.*)", re.DOTALL)  # at least two letters: C:\\ is a drive
SCAN = 1 << 24  # tokens that the vocabulary check looks at together


class TokenSource(ABC):
    """Tokens 0 .. `tokens` - 1 in a fixed order, divided into documents.

    A subclass sets `name`, `tokens` and `starts`, and answers `read`. The rest follows from them.
    """

    name: str
    """How messages call it, such as its path."""
    tokens: int
    """Tokens in all."""
    starts: Any
    """Where each document begins, as rising token numbers: an array, or what has `len` and is read by array indices."""
    eod: int | None = None
    """End-of-document token, where known."""

    @abstractmethod
    def read(self, start: int, count: int) -> np.ndarray:
        """(count,) integers: the tokens from `start` on."""

    def documents_before(self, positions: np.ndarray) -> np.ndarray:
        """For each position, how many documents begin before it."""
        return first_not_below(self.starts, np.asarray(positions, dtype=np.int64))

    def documents_in(self, start: int, count: int) -> np.ndarray:
        """Where documents begin among the `count` tokens from `start` on, counted from `start`."""
        first, last = self.documents_before(np.array([start, start + count]))
        return np.asarray(self.starts[int(first) : int(last)], dtype=np.int64) - start

    def check_vocabulary(self, vocab: int) -> None:
        """Refuse token ids that a model of `vocab` tokens lacks. Raises UserError with the place of the first."""
        for start in range(0, self.tokens, SCAN):
            part = self.read(start, min(SCAN, self.tokens - start))
            if int(part.max()) >= vocab or int(part.min()) < 0:
                at = int(((part < 0) | (part >= vocab)).argmax())
                raise UserError(
                    f"{self.name}: token {start + at} of {self.tokens} has the id {int(part[at])}, but the model's "
                    f"vocabulary has {vocab} ids, 0 to {vocab - 1}; set model.vocab to the tokenizer's, or build the "
                    "data with the model's tokenizer"
                )


def first_not_below(rising: Any, values: np.ndarray) -> np.ndarray:
    """As `numpy.searchsorted(rising, values)`, but reads only the entries it needs: `rising` may be a mapped file."""
    if isinstance(rising, np.ndarray) and rising.flags.aligned and not isinstance(rising, np.memmap):
        return np.searchsorted(rising, values)
    low = np.zeros(values.shape, dtype=np.int64)
    high = np.full(values.shape, len(rising), dtype=np.int64)
    while (open_ := low < high).any():
        middle = (low + high) // 2
        below = np.zeros(values.shape, dtype=bool)
        below[open_] = rising[middle[open_]] < values[open_]
        low = np.where(open_ & below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    return low


def open_source(path: str | Path) -> TokenSource:
    """The source at `path`: `name:rest` calls the registered source `name` with `rest`, all else is a token set."""
    match = REGISTERED.fullmatch(str(path))
    if match and not Path(path).exists():
        return plugins.find("sources", match[1], {})(match[2])
    from fivefold.data.tokens import TokenSet

    return TokenSet.open(path)
