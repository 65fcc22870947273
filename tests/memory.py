"""How much memory something leaves allocated: what a forward keeps for backward, by whatever means it keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.profiler import ProfilerActivity, profile

R = TypeVar("R")


def bytes_left(function: Callable[[], R]) -> tuple[int, R]:
    """Bytes of CPU memory that torch allocated for `function` and did not free, and what it returned."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = function()
    return sum(event.self_cpu_memory_usage for event in recorded.key_averages()), result
