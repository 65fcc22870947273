"""How long work takes on a device, repeated until the figure is steady, and agreed on by ranks that work together.

Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

ROUNDS = 5
MOST_CALLS = 2_000

Work = Callable[[], object]


@dataclass(frozen=True)
class Stopwatch:
    """Times work on one device. If `together`, all ranks time the same work, and the slowest rank's time counts."""

    device: torch.device
    budget: float
    """Seconds to spend on each piece of work, about."""
    together: bool = False

    def seconds(self, work: Work) -> float:
        """Seconds of one call of `work`: the median of several rounds of calls after a first one."""
        work()
        calls = self._agreed(self.budget / ROUNDS / max(self._round(work, 1), 1e-9))
        count = int(min(max(calls, 1), MOST_CALLS))
        return self._agreed(median(self._round(work, count) for _ in range(ROUNDS)))

    def _round(self, work: Work, calls: int) -> float:
        """Seconds a call."""
        if self.together:
            dist.barrier()
        if self.device.type == "cuda":
            return self._round_on_gpu(work, calls)
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - begin) / calls

    def _round_on_gpu(self, work: Work, calls: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    def _agreed(self, value: float) -> float:
        """The largest of the ranks' values, the same on all of them."""
        if not self.together:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, dist.ReduceOp.MAX)
        return float(shared.item())
