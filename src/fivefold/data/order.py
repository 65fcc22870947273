"""The order of samples: which window of which source is sample number i, as pure arithmetic on (seed, i).

Nothing is stored and nothing depends on the layout, so a data cursor is one integer and any rank can compute any
sample. Two ideas: sources are interleaved by counting (how many of the first n samples belong to a source is a
formula), and inside a source each epoch is a keyed permutation of its windows. numpy only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fivefold.errors import UserError

ROUNDS = 8
SHARE_BITS = 32  # a share is p / 2^32: over 10^9 samples it is right to a quarter of a sample
LOW = np.uint64((1 << SHARE_BITS) - 1)
GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Split:
    """An inner node of the interleaving: of n samples that reach it, round(n * share / 2^32) go left."""

    share: int
    left: Split | int
    right: Split | int

    def count_left(self, n: np.ndarray) -> np.ndarray:
        """How many of the first n samples go left; exact in 64 bits for any n below 2^63."""
        n = n.astype(np.uint64)
        share, half, bits = np.uint64(self.share), np.uint64(1 << (SHARE_BITS - 1)), np.uint64(SHARE_BITS)
        return ((n >> bits) * share + (((n & LOW) * share + half) >> bits)).astype(np.int64)


class SampleOrder:
    """Maps sample numbers to (source, window).

    windows: windows of each source, all of the same number of tokens, so that shares of samples are shares of tokens.
    weights: relative shares; a source of weight 0 is never read. Of the first n samples, source s has n * share(s), to
    within half a sample for two sources and two samples for any number. A source that ends begins its next epoch, in a
    new order.
    """

    def __init__(self, windows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        if len(windows) != len(weights) or not windows:
            raise UserError(f"{len(windows)} sources but {len(weights)} weights")
        for number, (count, weight) in enumerate(zip(windows, weights, strict=True)):
            if not math.isfinite(weight) or weight < 0:
                raise UserError(
                    f"data source {number} has the weight {weight}; a weight is a finite number, at least 0"
                )
            if count < 1 and weight > 0:
                raise UserError(f"data source {number} has no window to read")
        if not any(weights):
            raise UserError("all data sources have the weight 0; one at least must be read")
        self.windows, self.seed = list(windows), seed
        self._root = interleaving(weights)

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Source and window (both int64, shaped as `indices`) of each sample number."""
        indices = np.asarray(indices, dtype=np.int64)
        source = np.empty(indices.shape, dtype=np.int64)
        window = np.empty(indices.shape, dtype=np.int64)
        pending = [(self._root, np.ones(indices.shape, dtype=bool), indices)]
        while pending:
            node, mine, local = pending.pop()
            if isinstance(node, Split):
                before = node.count_left(local)
                goes_left = node.count_left(local + 1) > before
                pending.append((node.left, mine & goes_left, before))
                pending.append((node.right, mine & ~goes_left, local - before))
            elif mine.any():
                source[mine] = node
                window[mine] = self.window(node, local[mine])
        return source, window

    def window(self, source: int, places: np.ndarray) -> np.ndarray:
        """Window at each place of a source's own endless sequence: epoch after epoch, each a permutation."""
        count = self.windows[source]
        epoch, place = np.divmod(places, count)
        keys = epoch_keys(self.seed, source, epoch)
        return permute(place, count, keys)


def interleaving(weights: Sequence[float]) -> Split | int:
    """A Huffman tree over the sources: rounding errors do not add up, as an inner node has at most 2/3 of its
    parent."""
    tree: list[tuple[Fraction, int, Split | int]] = [
        (Fraction(weight), number, number) for number, weight in enumerate(weights) if weight > 0
    ]
    heapq.heapify(tree)
    fresh = len(weights)
    while len(tree) > 1:
        small, _, left = heapq.heappop(tree)
        large, _, right = heapq.heappop(tree)
        share = round(small / (small + large) * (1 << SHARE_BITS))
        heapq.heappush(tree, (small + large, fresh, Split(share, left, right)))
        fresh += 1
    return tree[0][2]


def epoch_keys(seed: int, source: int, epoch: np.ndarray) -> np.ndarray:
    """One 64-bit key a place, a hash of (seed, source, epoch)."""
    base = mix(np.array([seed & MASK], dtype=np.uint64))
    base = mix(base ^ np.uint64((source * GOLDEN + 1) & MASK))
    return mix(base ^ mix(epoch.astype(np.uint64) + np.uint64(GOLDEN)))


def permute(places: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """For each key a permutation of 0 .. count - 1, applied to `places`.

    A Feistel network over the next power of two; what falls outside the range is sent through again until it falls
    inside (cycle walking; under two passes on average). Source: Black and Rogaway 2002.
    """
    bits = max(1, (count - 1).bit_length())
    values = places.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = feistel(values[outside], bits, keys[outside])
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


def feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A keyed permutation of the `bits`-bit numbers: halves change in turn, each by a hash of the other."""
    right_bits = np.uint64((bits + 1) // 2)
    right_mask = np.uint64((1 << ((bits + 1) // 2)) - 1)
    left_mask = np.uint64((1 << (bits // 2)) - 1)
    left, right = values >> right_bits, values & right_mask
    for number in range(0, ROUNDS, 2):
        right = right ^ (mix(left ^ mix(keys + np.uint64(number))) & right_mask)
        left = left ^ (mix(right ^ mix(keys + np.uint64(number + 1))) & left_mask)
    return (left << right_bits) | right


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al. 2014) of uint64 arrays: each bit of the result depends on each bit of x."""
    x = (x + np.uint64(GOLDEN)) & np.uint64(MASK)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
