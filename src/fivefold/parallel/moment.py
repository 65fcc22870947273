"""A point in a device's work: on a GPU an event in its queue, for the host runs ahead by what the queue holds."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moment:
    """When the device has done all that was given to it before."""

    seconds: float
    event: torch.cuda.Event | None

    @classmethod
    def mark(cls, device: torch.device) -> Moment:
        """The point after all that the device was given so far."""
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return cls(time.perf_counter(), event)

    def wait(self) -> None:
        """Return when the device has come here."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, before: Moment) -> float:
        """Time that the device took from `before` to here; it must have come here."""
        if self.event is not None and before.event is not None:
            return before.event.elapsed_time(self.event) / 1000.0
        return self.seconds - before.seconds
