"""SIGTERM and Ctrl-C as a wish to stop: the step is finished and the state is saved before the process ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class StopWish:
    """Which signal asked to stop, if one did."""

    signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopWish]:
    """Turn the first SIGTERM or SIGINT into a wish; the second ends the process as it always did."""
    wish = StopWish()
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def ask(number: int, _: FrameType | None) -> None:
        wish.signal = signal.Signals(number)
        for kind in kinds:
            signal.signal(kind, before[kind])

    for kind in kinds:
        signal.signal(kind, ask)
    try:
        yield wish
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])
