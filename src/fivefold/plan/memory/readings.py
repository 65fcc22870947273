"""What a rank's memory is read as by allocator and driver, and whether all ranks find room. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Generic, TypeVar

from fivefold.plan.memory.overhead import GIB, Overhead


class Readings:
    """Of one rank."""

    parts: Mapping[str, float]
    """Bytes in tensors by category."""
    overhead: Overhead
    capacity: float
    """Bytes of the accelerator's memory."""

    @property
    def allocated(self) -> float:
        """In tensors: what the allocator calls allocated."""
        return sum(self.parts.values())

    @property
    def reserved(self) -> float:
        """What the allocator has taken from the device, gaps included; it gives gaps back before it fails."""
        return max(self.allocated, min(self.allocated * self.overhead.reserved, self.capacity - self.overhead.context))

    @property
    def nvidia_smi(self) -> float:
        """What the driver shows: with the context, libraries and the buffers of communicators."""
        return self.reserved + self.overhead.context

    @property
    def needed(self) -> float:
        """What it cannot run with less than: its tensors and the context, without gaps."""
        return self.allocated + self.overhead.context

    def readings(self) -> list[str]:
        """Each as a line with its number and what is in it."""
        overhead = self.overhead
        full = self.reserved < self.allocated * overhead.reserved
        gaps = "what is there; gaps are given back" if full else f"x {overhead.reserved:.2f}, {overhead.why_reserved}"
        return [
            f"reserved {self.reserved / GIB:.2f} GiB: {gaps}",
            f"nvidia-smi {self.nvidia_smi / GIB:.2f} GiB: + {overhead.context / GIB:.2f}, {overhead.why_context}",
        ]


Rank = TypeVar("Rank", bound=Readings)


class Filled(Generic[Rank]):
    """Of all pipeline ranks."""

    ranks: tuple[Rank, ...]
    """In their order."""
    capacity: float
    """Bytes of the accelerator's memory."""

    @cached_property
    def worst(self) -> Rank:
        """The fullest."""
        return max(self.ranks, key=lambda rank: rank.allocated)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's tensors and context find room."""
        return self.worst.needed <= self.capacity

    def is_tight(self, error: float) -> bool:
        """Whether it fits, and would not with so much more in tensors, as a fraction."""
        return self.fits and self.worst.needed + error * self.worst.allocated > self.capacity
