"""What one worker does: a block of input becomes tokens, lengths and a hash of each document.

A function of the block and the settings alone, so that any number of workers gives the same bytes. Workers are started
afresh (spawn), never forked: the tokenizer's own threads do not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice

import numpy as np
import tokenizers
import xxhash

from fivefold.data.read import Block, Skipped
from fivefold.data.tokenizer import Tokenizer
from fivefold.data.writer import token_dtype
from fivefold.errors import RunError

SURROGATES = re.compile("[\ud800-\udfff]")
EXAMPLES = 3
BATCH_CHARACTERS = 1 << 18  # texts encoded in one call: enough to amortize it, little enough to stay in cache
AHEAD = 3  # blocks a worker has waiting, done or to do


@dataclass(frozen=True)
class Settings:
    """All that a worker needs; small and picklable."""

    tokenizer: str
    """tokenizer.json's contents."""
    eod: int
    bos: int | None
    text_key: str
    seed: int
    """Of the hash that decides which documents are held out."""


@dataclass
class Tally:
    """What was read and what became of it: read = written + skipped."""

    read: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first few places of each reason."""
    replaced_surrogates: int = 0

    def skip(self, reason: str, where: str) -> None:
        """Count something read that will not be written."""
        self.skipped[reason] += 1
        if where and len(places := self.examples.setdefault(reason, [])) < EXAMPLES:
            places.append(where)

    def add(self, other: Tally) -> None:
        """Add what another block counted."""
        self.read += other.read
        self.skipped.update(other.skipped)
        self.replaced_surrogates += other.replaced_surrogates
        for reason, places in other.examples.items():
            mine = self.examples.setdefault(reason, [])
            mine.extend(places[: EXAMPLES - len(mine)])


@dataclass(frozen=True)
class Encoded:
    """A block's documents, n of them."""

    tokens: np.ndarray
    """All tokens, joined, each document with its end-of-document token."""
    lengths: np.ndarray
    """(n,) int32."""
    text_bytes: np.ndarray
    """(n,) int64: of UTF-8."""
    hashes: np.ndarray
    """(n, 2) uint64: 128 bits of (seed, text)."""
    tally: Tally
    size: int
    """The block's bytes of input."""


def clean_texts(block: Block, text_key: str, tally: Tally) -> Iterator[str]:
    """The texts of a block that are worth writing: empty ones are counted and left out, lone surrogates replaced."""
    for item in block.documents(text_key):
        tally.read += 1
        if isinstance(item, Skipped):
            tally.skip(item.reason, item.where)
        elif not item or item.isspace():
            tally.skip("empty", "")
        elif item.isascii() or not SURROGATES.search(item):
            yield item
        else:
            text, count = SURROGATES.subn("\ufffd", item)
            tally.replaced_surrogates += count
            yield text


def encode_block(block: Block, tokenizer: Tokenizer, settings: Settings) -> Encoded:
    """Read, clean, hash and tokenize a block. Raises UserError for a fault in the input."""
    tally = Tally()
    dtype = token_dtype(tokenizer.vocab_size)
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    sizes: list[int] = []
    hashes: list[int] = []
    texts = clean_texts(block, settings.text_key, tally)
    while some := take_characters(texts, BATCH_CHARACTERS):
        for text, ids in zip(some, tokenizer.encode_batch(some), strict=True):
            data = text.encode("utf-8")
            ids.append(tokenizer.eod)
            tokens.append(np.array(ids, dtype=dtype))
            lengths.append(len(ids))
            sizes.append(len(data))
            hashes.append(xxhash.xxh3_128_intdigest(data, settings.seed))
    return Encoded(
        np.concatenate(tokens) if tokens else np.empty(0, dtype),
        np.array(lengths, dtype=np.int32),
        np.array(sizes, dtype=np.int64),
        np.array([(value >> 64, value & (1 << 64) - 1) for value in hashes], dtype=np.uint64).reshape(-1, 2),
        tally,
        block.size,
    )


def take_characters(texts: Iterator[str], characters: int) -> list[str]:
    """The next texts, until they have so many characters together."""
    taken: list[str] = []
    total = 0
    while total < characters and (text := next(texts, None)) is not None:
        taken.append(text)
        total += len(text)
    return taken


def encode_all(blocks: Iterator[Block], tokenizer: Tokenizer, settings: Settings, workers: int) -> Iterator[Encoded]:
    """Encode blocks in their order, by `workers` processes; so few are under way at once that memory stays flat.

    With one worker, or only one block, this process does it itself.
    """
    head = list(islice(blocks, 2))
    blocks = chain(head, blocks)
    if workers == 1 or len(head) < 2:
        for block in blocks:
            yield encode_block(block, tokenizer, settings)
        return
    with ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=start_worker, initargs=(settings,)
    ) as pool:
        pending: deque[Future[Encoded]] = deque()
        try:
            for block in blocks:
                pending.append(pool.submit(work, block))
                if len(pending) >= workers * AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise RunError(
                f"one of the {workers} workers was killed, perhaps for want of memory (each holds its largest document "
                "whole); nothing was written; try fewer with --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


WORKER: dict[str, tuple[Tokenizer, Settings]] = {}


def start_worker(settings: Settings) -> None:
    """Called once in each new process. Ctrl-C is the main process's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    inner = tokenizers.Tokenizer.from_str(settings.tokenizer)
    WORKER["state"] = Tokenizer(inner, settings.eod, settings.bos), settings


def work(block: Block) -> Encoded:
    """Encode a block in a worker."""
    return encode_block(block, *WORKER["state"])


def spread_sample(blocks: Iterator[Block], text_key: str, budget: int) -> Iterator[str]:
    """Texts of at most `budget` bytes, evenly spread over the corpus, to train a tokenizer on.

    Keeps every k-th block; whenever the kept ones exceed the budget every second is dropped and k doubles. A block
    counts for at most a sixteenth of the budget, and a text longer than that is sampled in pieces.
    """
    most = max(1, budget // 16)
    kept: list[Block] = []
    stride = 1
    for number, block in enumerate(blocks):
        if number % stride == 0:
            kept.append(block)
        while len(kept) > 1 and sum(min(each.size, most) for each in kept) > budget:
            kept, stride = kept[::2], stride * 2
    for block in kept:
        left = most if block.size > most or len(kept) > 1 else budget
        for text in clean_texts(block, text_key, Tally()):
            yield from spread_pieces(text, left)
            left -= len(text)
            if left <= 0:
                break


def spread_pieces(text: str, characters: int) -> Sequence[str]:
    """The text, or sixteen pieces spread evenly over it, of so many characters together."""
    if len(text) <= characters:
        return [text]
    length = max(1, characters // 16)
    return [text[at : at + length] for at in range(0, len(text) - length + 1, max(1, (len(text) - length) // 15))]
