"""SIGTERM and Ctrl-C as a wish to stop: the step is finished and the state is saved before the process ends."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from fivefold.launch.environment import ONE_WISH_S


@dataclass
class StopWish:
    """Which signal asked to stop, if one did."""

    signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopWish]:
    """Turn the first SIGTERM or SIGINT into a wish; a later one, not of the same wish, ends the process as ever.

    Python lets only the main thread do this: in another one there are no wishes.
    """
    wish = StopWish()
    kinds = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    before = {kind: signal.getsignal(kind) for kind in kinds}

    first = math.inf

    def ask(number: int, _: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if not wish:
            wish.signal, first = signal.Signals(number), now
        elif now - first >= ONE_WISH_S:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

    for kind in kinds:
        signal.signal(kind, ask)
    try:
        yield wish
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])
