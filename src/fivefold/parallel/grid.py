"""The numbering of ranks: pure arithmetic, so that a plan of any world needs no torch.

Ranks are numbered once, with the axes pp (outermost), replicate, shard, cp and tp (innermost, so that its ranks share
the fastest links). dp = replicate x shard, and world = pp x dp x cp x tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from fivefold.config.run import Parallel


class Role(NamedTuple):
    """Where a rank stands on each axis."""

    pp: int
    replicate: int
    shard: int
    cp: int
    tp: int


AXES = Role._fields
"""The axes, outermost first."""


@dataclass(frozen=True)
class Grid:
    """The degrees of a layout, one field an axis."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, parallel: Parallel, world: int) -> Grid:
        """The grid of a layout on `world` ranks, which the rules have found to be filled by it."""
        dp = world // (parallel.pp * parallel.cp * parallel.tp)
        return cls(parallel.pp, parallel.replicate, dp // parallel.replicate, parallel.cp, parallel.tp)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The degrees in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world(self) -> int:
        """Ranks in all."""
        return prod(self.sizes)

    @property
    def dp(self) -> int:
        """Shares of a batch."""
        return self.replicate * self.shard

    def role(self, rank: int) -> Role:
        """Where `rank` stands."""
        places = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            places.append(place)
        return Role(*reversed(places))

    def rank(self, role: Role) -> int:
        """Which rank stands there."""
        number = 0
        for size, place in zip(self.sizes, role, strict=True):
            number = number * size + place
        return number

    def dp_rank(self, rank: int) -> int:
        """Which of the `dp` shares of a batch `rank` works on."""
        role = self.role(rank)
        return role.replicate * self.shard + role.shard

    def peers(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` along `axes` alone, itself among them, in ascending order."""
        standing = zip(AXES, self.sizes, self.role(rank), strict=True)
        places = product(*(range(size) if axis in axes else [place] for axis, size, place in standing))
        return [self.rank(Role(*role)) for role in places]
