"""The transfers between the pipeline ranks of one (dp, cp, tp) coordinate: whole tensors, from one rank to another.

Every ordered pair of ranks is a channel of its own, first in, first out: receives meet sends in the order in which each
side asked for them. Two process groups over the same ranks carry them, one those to higher ranks and one those to lower
ones, so that on a GPU each channel has a communicator and a stream of its own and a send never waits behind a receive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.axis import Pending

T = TypeVar("T")

Channel = tuple[int, int]
"""Source and target, ranks of pp."""


@dataclass(frozen=True)
class Sent:
    """A tensor on its way, kept until it has left. It must not be changed before."""

    tensor: Tensor
    work: Any

    def done(self) -> bool:
        """Whether it has left; never waits. gloo only says so of one that was waited for."""
        return self.work.is_completed()

    def wait(self) -> None:
        """Until it has left: on a GPU the current stream waits and the host does not."""
        self.work.wait()


@dataclass(frozen=True)
class Links:
    """Ranks 0 to size - 1 of pp, of which this process is `rank`."""

    rank: int = 0
    size: int = 1
    down: dist.ProcessGroup | None = None
    """Carries what goes to a higher rank; None with one rank only."""
    up: dist.ProcessGroup | None = None
    """Carries what goes to a lower rank."""

    def send(self, x: Tensor, target: int) -> Sent:
        """Start to send `x` to another rank, once what the current stream computes so far is there."""
        x = x.contiguous()
        work = dist.isend(x, group=self._carrier((self.rank, target)), group_dst=target)
        return Sent(x, work)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int) -> Pending:
        """Start to receive the next tensor from another rank, which must send one of this shape and format.

        On a GPU the transfer begins after what the current stream computes so far: asked for early, it runs beside
        what is computed meanwhile. But the first use of a kernel waits until the GPU rests, and so for open receives:
        a message that depends on such a use must not be asked for before it.
        """
        out = torch.empty(shape, dtype=dtype, device=device)
        work = dist.irecv(out, group=self._carrier((source, self.rank)), group_src=source)
        return Pending(out, (work,), out)

    def warm_up(self, channels: Iterable[Channel], device: torch.device) -> None:
        """Use each channel once; a collective call, with the same channels on every rank.

        NCCL connects two ranks at their first transfer, for which both must be there: done in the midst of a schedule
        that can deadlock. Here each rank meets its partners in the same rounds as they meet it.
        """
        wanted = set(channels)
        for low, high in (pair for pairs in rounds(wanted) for pair in pairs if self.rank in pair):
            started: list[Sent | Pending] = []
            for source, target in (channel for channel in ((low, high), (high, low)) if channel in wanted):
                if self.rank == source:
                    started.append(self.send(torch.zeros(1, device=device), target))
                else:
                    started.append(self.receive((1,), torch.float32, device, source))
            for each in started:
                each.wait()

    def gather(self, value: T) -> list[T]:
        """The value of each rank, in their order, on every rank; it must be picklable. A collective call."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.down)
        return values

    def _carrier(self, channel: Channel) -> dist.ProcessGroup | None:
        source, target = channel
        return self.down if source < target else self.up


NO_LINKS = Links()
"""Those of a layout without pipeline."""


def rounds(channels: Iterable[Channel]) -> list[list[Channel]]:
    """The pairs of ranks that `channels` join, lower rank first, in rounds in which no rank has two partners.

    Neighbours take two rounds, a ring of oddly many three.
    """
    found: list[list[Channel]] = []
    for pair in sorted({(min(channel), max(channel)) for channel in channels}):
        free = (pairs for pairs in found if not {rank for each in pairs for rank in each} & set(pair))
        chosen = next(free, None)
        if chosen is None:
            found.append(chosen := [])
        chosen.append(pair)
    return found
