"""When a rank's actions ran, and a host that does not run far ahead of its device.

On a GPU the host only queues work. It waits here until the device is at most a few actions behind: memory that was sent
away is then given back in time, and a pipeline that stands still is noticed, with the action that it stands in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fivefold.errors import RunError
from fivefold.pipeline.schedule import Action

AHEAD = 8
"""Actions that the host may have queued: few enough for memory, enough to keep the device busy."""
STALLED_S = 480.0
"""Below the ten minutes after which the process groups end the process without saying where it stood."""
POLL_S = 1e-4

Span = tuple[str, float, float]
"""An action's text, its start and its end in seconds of the wall clock."""


class Clock:
    """Of one rank's device. `describe` says of an action what it waits for."""

    def __init__(self, device: torch.device, describe: Callable[[Action], str] = str) -> None:
        self._device, self._describe = device, describe
        self._queued: deque[tuple[Action, torch.cuda.Event]] = deque()
        self._recorded: list[tuple[Action, torch.cuda.Event | float, torch.cuda.Event | float]] | None = None

    def now(self) -> float:
        """Seconds of the wall clock, once the device has done all that was queued."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.time()

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """What the current stream computes inside is `action`. Raises RunError if the device stands still."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            yield
            if self._recorded is not None:
                self._recorded.append((action, start, time.perf_counter()))
            return
        records = self._recorded is not None
        begin = torch.cuda.Event(enable_timing=True) if records else None
        end = torch.cuda.Event(enable_timing=records)
        if begin is not None:
            begin.record()
        yield
        end.record()
        if begin is not None and self._recorded is not None:
            self._recorded.append((action, begin, end))
        self._queued.append((action, end))
        self._keep_pace()

    @contextmanager
    def recording(self) -> Iterator[list[Span]]:
        """The actions inside; the list has them afterwards, when the device has done them."""
        spans: list[Span] = []
        wall, zero = self.now(), self._mark()
        self._recorded = []
        try:
            yield spans
            self.now()
            spans += [
                (str(action), wall + _between(zero, begin), wall + _between(zero, end))
                for action, begin, end in self._recorded
            ]
        finally:
            self._recorded = None

    def _mark(self) -> torch.cuda.Event | float:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _keep_pace(self) -> None:
        while len(self._queued) > AHEAD:
            action, end = self._queued.popleft()
            since = time.monotonic()
            while not end.query():
                time.sleep(POLL_S)
                if time.monotonic() - since > STALLED_S:
                    raise RunError(
                        f"the pipeline stands still: {self._describe(action)}, has not ended in {STALLED_S:.0f} s"
                    )


def _between(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    """Seconds from one mark to another of the same kind."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float), "marks of one device"
        assert isinstance(end, float), "marks of one device"
        return end - start
    return start.elapsed_time(end) / 1000
