"""Windows of a token source: seq_len tokens and their targets, neighbours sharing one token.

Window k covers tokens k * seq_len to (k + 1) * seq_len, both included, so that each token but the first of the source
is a target exactly once; the last window may be short. What a window holds is counted here from the documents'
boundaries alone, without reading a token. numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fivefold.data.source import TokenSource
from fivefold.errors import UserError


def window_count(tokens: int, seq_len: int) -> int:
    """Windows of a source of `tokens` tokens."""
    return max(0, -(-(tokens - 1) // seq_len))


def check_long_enough(source: TokenSource, seq_len: int) -> None:
    """Refuse a training source that does not fill one window. Raises UserError with the numbers."""
    if source.tokens < seq_len + 1:
        raise UserError(
            f"{source.name} has {source.tokens} tokens, but one sequence takes {seq_len + 1} (data.seq_len {seq_len} "
            f"and the token after it); use more data, or a data.seq_len of at most {max(0, source.tokens - 1)}"
        )


def check_has_targets(source: TokenSource, document_mask: bool) -> None:
    """Refuse a source in which no token can be predicted from another. Raises UserError."""
    documents = len(source.starts)
    if document_mask and source.tokens - documents < 1:
        raise UserError(
            f"{source.name} has {source.tokens} tokens in {documents} documents: with data.document_mask the first "
            "token of a document is no target, so nothing is left to learn; use longer documents, or "
            "data.document_mask: false"
        )


@dataclass(frozen=True)
class Spans:
    """Some windows, described: arrays of one entry a window."""

    source: np.ndarray
    start: np.ndarray
    """First token."""
    targets: np.ndarray
    """Tokens that have a next one inside the window: seq_len, or fewer in the last window of a source."""
    first_document: np.ndarray
    """Number of the first document that begins after the window's first token."""
    last_document: np.ndarray
    """One more than the number of the last document that begins in the window."""
    labels: np.ndarray
    """Targets that count: all, or those that do not begin a document."""

    def __getitem__(self, which: slice | np.ndarray) -> Spans:
        return Spans(
            *(
                getattr(self, name)[which]
                for name in ("source", "start", "targets", "first_document", "last_document", "labels")
            )
        )


def spans(
    sources: Sequence[TokenSource], source: np.ndarray, window: np.ndarray, seq_len: int, document_mask: bool
) -> Spans:
    """Describe windows `window` (n,) of the sources `source` (n,)."""
    totals = np.array([each.tokens for each in sources], dtype=np.int64)
    start = window * seq_len
    targets = np.minimum(seq_len, totals[source] - 1 - start)
    first = np.zeros(len(source), dtype=np.int64)
    last = np.zeros(len(source), dtype=np.int64)
    if document_mask:
        for number in np.unique(source):
            mine = source == number
            edges = np.concatenate([start[mine] + 1, start[mine] + 1 + targets[mine]])
            first[mine], last[mine] = np.split(sources[number].documents_before(edges), 2)
    return Spans(source, start, targets, first, last, targets - (last - first))


def labels_ahead(sources: Sequence[TokenSource], rows: Spans, depths: int) -> tuple[int, ...]:
    """How many labels depths 1 to `depths` of multi-token prediction have in these windows: one more place ahead each.

    A position of a document that the window holds n tokens of has a label at depth k if k + 1 more tokens follow in
    it: n - 1 - k of them have. A window that was described without document masks is one document.
    """
    if depths == 0:
        return ()
    lengths = _lengths(sources, rows)
    return tuple(int(np.maximum(lengths - 1 - depth, 0).sum()) for depth in range(1, depths + 1))


def _lengths(sources: Sequence[TokenSource], rows: Spans) -> np.ndarray:
    """Tokens of each document in each of the windows, inputs and the last target."""
    found = []
    for number in np.unique(rows.source):
        mine = rows[rows.source == number]
        beginning = mine.last_document - mine.first_document  # in each window, after its first token
        ends = beginning.cumsum()
        place = np.arange(ends[-1]) + np.repeat(mine.first_document - (ends - beginning), beginning)
        begins = np.asarray(sources[number].starts[place], dtype=np.int64)
        until = np.insert(begins, ends, mine.start + mine.targets + 1)
        found.append(until - np.insert(begins, ends - beginning, mine.start))
    return np.concatenate(found)
