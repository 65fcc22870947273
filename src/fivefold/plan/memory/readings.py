"""What a rank's memory is read as by allocator and driver, and whether all ranks find room. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from fivefold.plan.memory.overhead import GIB, Overhead
from fivefold.plan.table import long_table_lines


class Readings:
    """Of one rank."""

    categories: ClassVar[Mapping[str, str]]
    """What each category is, in the order in which they are shown."""
    pp: int
    """The pipeline rank."""
    stages: tuple[int, ...]
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

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "pp": self.pp,
            "stages": list(self.stages),
            "bytes": {name: self.parts.get(name, 0.0) for name in self.categories},
            "allocated": self.allocated,
            "reserved": self.reserved,
            "nvidia_smi": self.nvidia_smi,
        }

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

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "ranks": [rank.json() for rank in self.ranks],
            "worst": self.worst.pp,
            "capacity": self.capacity,
            "fits": self.fits,
        }

    def table(self) -> list[str]:
        """A line a pipeline rank, in GiB."""
        used = [name for name in self.worst.categories if any(rank.parts.get(name) for rank in self.ranks)]

        def row(number: int) -> Sequence[str]:
            rank = self.ranks[number]
            sizes = (*(rank.parts.get(name, 0.0) for name in used), rank.allocated, rank.reserved, rank.nvidia_smi)
            return (str(rank.pp), *(f"{each / GIB:.2f}" for each in sizes), "fullest" if rank is self.worst else "")

        head = ("pp, GiB", *(name.replace("_", " ") for name in used), "in tensors", "reserved", "nvidia-smi", "")
        return long_table_lines(head, row, len(self.ranks), "pipeline ranks")
