"""Moving memory between a device and the CPU beside the computation.

A lane is a stream for one direction. What it copies must be finished in, or waited for by, the stream that computes:
the caller orders that with the events. Without CUDA everything is copied at once and there are no events.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Event = torch.cuda.Event | None
"""A point in a stream's work; None for one that has passed."""


class Lane:
    """One direction of transfers between `device` and the CPU, in order among themselves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Iterable[Event] = ()) -> Event:
        """Copy each (target, source) once what was queued for computing, and `after`, is done. Returns when they are.

        The tensors must live, and their values stay, until then.
        """
        if self.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        for event in after:
            if event is not None:
                self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self.stream.record_event()


class Reading:
    """Numbers that are on their way to the host; what is queued before they are asked for runs meanwhile."""

    def __init__(self, x: Tensor) -> None:
        self._x = x.to("cpu", non_blocking=True)
        self._event = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None

    def wait(self) -> list[int]:
        """The numbers, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._x.tolist()


def wait(event: Event, device: torch.device) -> None:
    """Have what is computed on `device` from now on wait for the event."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
