"""Delivery: from the sample order to the microbatches of one data-parallel rank, prepared ahead by a thread.

Which sample goes where is one function, `sample_numbers`; the global order of samples does not depend on the number of
ranks or the size of a microbatch. How many labels a whole step has is known to every rank without communication.
"""

# b sequences a microbatch  s tokens a sequence (seq_len)

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold.data.order import SampleOrder
from fivefold.data.source import TokenSource
from fivefold.data.windows import Spans, check_has_targets, check_long_enough, labels_ahead, spans, window_count
from fivefold.errors import UserError

IGNORE = -100
"""Label of a position that has no target; what `cross_entropy` ignores."""
POLL_S = 0.1


@dataclass(frozen=True)
class Microbatch:
    """Sequences that one rank runs together."""

    tokens: Tensor
    """(b, s) int64."""
    labels: Tensor
    """(b, s) int64: the token after each token, IGNORE where there is none."""
    documents: Tensor | None
    """(b, s) int32: number of the document within the row, 0 first; None without document masks."""
    packed: bool
    """Whether some row holds more than one document; known on the host, so no kernel choice waits for the device."""

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Microbatch:
        """The same microbatch on `device`."""
        documents = None if self.documents is None else self.documents.to(device, non_blocking=non_blocking)
        tokens = self.tokens.to(device, non_blocking=non_blocking)
        return Microbatch(tokens, self.labels.to(device, non_blocking=non_blocking), documents, self.packed)

    def pin_memory(self) -> Microbatch:
        """The same microbatch in page-locked memory, from which copies to a GPU can overlap."""
        documents = None if self.documents is None else self.documents.pin_memory()
        return Microbatch(self.tokens.pin_memory(), self.labels.pin_memory(), documents, self.packed)


@dataclass(frozen=True)
class Step:
    """What one rank runs in one optimizer step."""

    microbatches: list[Microbatch]
    labels: int
    """Labels of the whole global batch, over all ranks: the loss is divided by this."""
    mtp_labels: tuple[int, ...] = field(default=(), kw_only=True)
    """Of each depth of multi-token prediction, likewise."""
    first_sample: int
    """Number of the step's first sample in the global order."""
    size: int
    """Samples of the whole global batch: the cursor after this step is first_sample + size."""


def sample_order(sources: Sequence[TokenSource], weights: Sequence[float], seq_len: int, seed: int) -> SampleOrder:
    """The order over these sources. Raises UserError for a source that is shorter than one sequence."""
    for source in sources:
        check_long_enough(source, seq_len)
    return SampleOrder([window_count(source.tokens, seq_len) for source in sources], weights, seed)


def sample_numbers(cursor: int, global_size: int, micro_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
    """(accumulation, micro_size): which samples of the global order a rank runs in the step that begins at `cursor`.

    Sequence j of microbatch m on rank r is cursor + m * micro_size * dp_size + r * micro_size + j.
    """
    return cursor + np.arange(global_size).reshape(-1, dp_size, micro_size)[:, dp_rank]


class Loader:
    """Steps without end for one data-parallel rank, from sample `samples` on.

    mtp: depths of multi-token prediction, whose labels are counted too.
    device: where the microbatches are delivered; to a GPU they are copied from pinned memory, asynchronously.
    prefetch: steps that the thread prepares ahead. An error in the thread is raised by the next `next()`.
    Close it, or use it as a context manager.
    Raises UserError for sizes that do not divide, and sources without a target.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        order: SampleOrder,
        *,
        seq_len: int,
        document_mask: bool,
        global_size: int,
        micro_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        samples: int = 0,
        mtp: int = 0,
        device: torch.device | str = "cpu",
        prefetch: int = 2,
    ) -> None:
        if global_size % (micro_size * dp_size):
            raise UserError(
                f"batch.global_size {global_size} does not divide by batch.micro_size {micro_size} x dp {dp_size} = "
                f"{micro_size * dp_size}"
            )
        for source in sources:
            check_has_targets(source, document_mask)
        self.device = torch.device(device)
        self._samples = samples
        assemble = Assembler(sources, order, seq_len, document_mask, global_size, micro_size, dp_rank, dp_size, mtp)
        self._ready: queue.Queue[Step | BaseException] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        arguments = (assemble, samples, self.device.type == "cuda", self._ready, self._stop)
        self._thread = threading.Thread(target=prepare_steps, args=arguments, name="fivefold-loader", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, self._stop.set)

    @property
    def samples(self) -> int:
        """The data cursor: samples delivered so far, over all ranks, since the beginning of the run."""
        return self._samples

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if self._stop.is_set():
            raise StopIteration
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._samples = item.first_sample + item.size
        return replace(item, microbatches=[each.to(self.device) for each in item.microbatches])

    def close(self) -> None:
        """Stop the thread and wait for it. May be called again."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Assembler:
    """Makes a rank's part of the step that begins at any cursor."""

    sources: Sequence[TokenSource]
    order: SampleOrder
    seq_len: int
    document_mask: bool
    global_size: int
    micro_size: int
    dp_rank: int
    dp_size: int
    mtp: int

    def __call__(self, cursor: int) -> Step:
        source, window = self.order.locate(np.arange(cursor, cursor + self.global_size))
        all_spans = spans(self.sources, source, window, self.seq_len, self.document_mask)
        mine = sample_numbers(0, self.global_size, self.micro_size, self.dp_rank, self.dp_size)
        microbatches = [
            make_microbatch(self.sources, all_spans[rows], len(rows), self.seq_len, self.document_mask) for rows in mine
        ]
        ahead = labels_ahead(self.sources, all_spans, self.mtp)
        return Step(microbatches, int(all_spans.labels.sum()), cursor, self.global_size, mtp_labels=ahead)


def prepare_steps(assemble: Assembler, cursor: int, pin: bool, ready: queue.Queue[Any], stop: threading.Event) -> None:
    """The thread's work. It holds no reference to the loader, so a forgotten loader can be collected and ends it."""
    while not stop.is_set():
        item: Step | BaseException
        try:
            item = assemble(cursor)
            if pin:
                item = replace(item, microbatches=[each.pin_memory() for each in item.microbatches])
            cursor += item.size
        except BaseException as error:
            item = error
        while not stop.is_set():
            try:
                ready.put(item, timeout=POLL_S)
                break
            except queue.Full:
                continue
        if isinstance(item, BaseException):
            return


def make_microbatch(
    sources: Sequence[TokenSource], rows: Spans, size: int, seq_len: int, document_mask: bool
) -> Microbatch:
    """Read the windows `rows` into a microbatch of `size` sequences; sequences beyond the rows have no labels."""
    tokens_bs = np.zeros((size, seq_len), dtype=np.int64)
    labels_bs = np.full((size, seq_len), IGNORE, dtype=np.int64)
    documents_bs = np.zeros((size, seq_len), dtype=np.int32) if document_mask else None
    packed = False
    for row in range(len(rows.start)):
        source, start, targets = sources[rows.source[row]], int(rows.start[row]), int(rows.targets[row])
        window = source.read(start, targets + 1)
        tokens_bs[row, :targets] = window[:-1]
        tokens_bs[row, targets:] = source.eod or 0
        labels_bs[row, :targets] = window[1:]
        if documents_bs is None:
            continue
        begins = np.asarray(source.starts[int(rows.first_document[row]) : int(rows.last_document[row])]) - start
        labels_bs[row, begins - 1] = IGNORE
        inside = begins[begins < targets]
        documents_bs[row, inside] = 1
        np.cumsum(documents_bs[row], out=documents_bs[row])
        packed |= len(inside) > 0
    documents = None if documents_bs is None else torch.from_numpy(documents_bs)
    return Microbatch(torch.from_numpy(tokens_bs), torch.from_numpy(labels_bs), documents, packed)


def check_validation_set(source: TokenSource, seq_len: int, tokens: int, document_mask: bool) -> None:
    """Raises UserError for a source without a target, or `tokens` below one sequence."""
    if source.tokens < 2:
        raise UserError(f"{source.name} has {source.tokens} tokens: a validation set needs two at least")
    check_has_targets(source, document_mask)
    if source.tokens > tokens and tokens < seq_len:
        raise UserError(f"validate.tokens {tokens} is less than one sequence: data.seq_len is {seq_len}")


def validation_batches(
    source: TokenSource, seq_len: int, tokens: int, micro_size: int, dp_rank: int, dp_size: int, document_mask: bool
) -> Iterator[Microbatch]:
    """The validation microbatches of one rank: the same windows each time, each once over all ranks.

    The whole source if it has at most `tokens` tokens, else tokens // seq_len windows spread evenly over it. Every rank
    gets the same number of microbatches (filled with sequences without labels), so no collective waits for ever.
    Raises UserError as `check_validation_set`, at once.
    """
    check_validation_set(source, seq_len, tokens, document_mask)
    windows = window_count(source.tokens, seq_len)
    chosen = np.arange(windows)
    if source.tokens > tokens:
        count = min(windows, tokens // seq_len)
        chosen = np.arange(count) * windows // count
    return _validation_microbatches(source, chosen, seq_len, micro_size, dp_rank, dp_size, document_mask)


def _validation_microbatches(
    source: TokenSource,
    chosen: np.ndarray,
    seq_len: int,
    micro_size: int,
    dp_rank: int,
    dp_size: int,
    document_mask: bool,
) -> Iterator[Microbatch]:
    together = micro_size * dp_size
    for first in range(0, len(chosen), together):
        mine = chosen[first + dp_rank * micro_size : min(first + (dp_rank + 1) * micro_size, first + together)]
        rows = spans([source], np.zeros(len(mine), dtype=np.int64), mine, seq_len, document_mask)
        yield make_microbatch([source], rows, micro_size, seq_len, document_mask)
