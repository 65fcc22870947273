"""The ranks along one axis of the mesh, and the collectives among them.

With one rank each of them is the identity. Those that `start_` return at once; `wait` gives the result and lets the
device's current stream wait for it, so that what is queued between the two runs beside the transfer. Tensors are cut
and joined along dimension 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.stopwatch import Stopwatch

GATHER, REDUCE_SCATTER = (
    new if hasattr(dist, new) else old
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)
"""torch 2.13 renamed them, and warns of the old names."""


@dataclass(frozen=True)
class Pending:
    """A transfer under way."""

    result: Tensor
    works: Sequence[Any]
    source: Tensor
    """Kept until the transfer has ended."""
    stopwatch: Stopwatch | None = None
    """Times the waiting."""

    def wait(self) -> Tensor:
        """The result, once it is there."""
        with nullcontext() if self.stopwatch is None else self.stopwatch.running():
            for work in self.works:
                work.wait()
        return self.result


@dataclass(frozen=True)
class Axis:
    """Ranks 0 to size - 1 of a group, of which this process is `rank`."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    """None with one rank only."""
    stopwatch: Stopwatch | None = field(default=None, compare=False)
    """Times how long this rank waits for what the others send in all-to-alls."""

    def start_gather(self, x: Tensor) -> Pending:
        """(t, ...) of each rank, joined in the order of the ranks: (size t, ...)."""
        if self.size == 1:
            return Pending(x, (), x)
        x = x.contiguous()
        joined = x.new_empty((self.size * len(x), *x.shape[1:]))
        return Pending(joined, [getattr(dist, GATHER)(joined, x, group=self.group, async_op=True)], x)

    def start_reduce_scatter(self, x: Tensor, out: Tensor | None = None) -> Pending:
        """The sum over ranks of (size t, ...), of which each rank gets its part (t, ...), in `out` if it is given."""
        if self.size == 1:
            return Pending(x, (), x)
        x = x.contiguous()
        part = x.new_empty((len(x) // self.size, *x.shape[1:])) if out is None else out
        return Pending(part, [getattr(dist, REDUCE_SCATTER)(part, x, group=self.group, async_op=True)], x)

    def start_exchange(self, x: Tensor, hops: int, out: Tensor | None = None) -> Pending:
        """`x` goes to the rank so many hops further on; what comes from the one as many before, in `out` if given."""
        out = torch.empty_like(x) if out is None else out
        further, before = (self.rank + hops) % self.size, (self.rank - hops) % self.size
        sends = dist.P2POp(dist.isend, x, group=self.group, group_peer=further)
        receives = dist.P2POp(dist.irecv, out, group=self.group, group_peer=before)
        return Pending(out, dist.batch_isend_irecv([sends, receives]), x)

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        """The first send[0] rows of `x` go to rank 0, the next send[1] to rank 1, and so on; what comes from each rank,
        receive[0] rows first, is joined in the order of the ranks. Any number may be 0."""
        if self.size == 1:
            return Pending(x, (), x)
        x = x.contiguous()
        out = x.new_empty((sum(receive), *x.shape[1:]))
        work = dist.all_to_all_single(out, x, list(receive), list(send), group=self.group, async_op=True)
        return Pending(out, [work], x, self.stopwatch)

    def gather(self, x: Tensor) -> Tensor:
        """As `start_gather`, waited for."""
        return self.start_gather(x).wait()

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """As `start_reduce_scatter`, waited for."""
        return self.start_reduce_scatter(x).wait()

    def sum_(self, x: Tensor) -> Tensor:
        """`x` summed over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.SUM, group=self.group)
        return x

    def max_(self, x: Tensor) -> Tensor:
        """The largest of each element over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x


ALONE = Axis()
"""An axis that the layout does not use."""
