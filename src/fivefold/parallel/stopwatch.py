"""How long this rank's device waited for others, without waiting for the device to say so.

What waits marks two points of the device's work; the time between them is read later, when the device has come past.
Whoever measures makes a `Stopwatch` and gives it to the axis whose transfers it is to time: there is no global one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fivefold.parallel.moment import Moment


@dataclass(frozen=True)
class Lap:
    """What a stopwatch measured in some time."""

    spans: Sequence[tuple[Moment, Moment]]

    def seconds(self) -> float:
        """Their sum. On a GPU: what its stream stood still, so transfers beside computation cost nothing; the device
        must have come past all of them."""
        return sum(end.seconds_since(begin) for begin, end in self.spans)


class Stopwatch:
    """Of one rank's device. Costs two events a span on a GPU, two readings of the clock on a CPU.

    It measures from its first lap on: where nobody reads it, nothing piles up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Moment, Moment]] | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures what the device does inside: on a GPU the current stream, on a CPU this thread."""
        if self._spans is None:
            yield
            return
        begin = Moment.mark(self._device)
        yield
        self._spans.append((begin, Moment.mark(self._device)))

    def lap(self) -> Lap:
        """All that was measured since the last lap."""
        spans, self._spans = self._spans or [], []
        return Lap(spans)
