"""The processes that share one checkpoint, and the few collectives that they need.

The group is gloo and belongs to checkpoints alone: a background save that talked over the training's own group would
meet its collectives in another order on another rank, and stop both. Without torch.distributed it is one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """The ranks of `group`, or this process alone if `group` is None."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1
        self.first = self.rank == 0

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        """`group` (able to do CPU collectives), or a new gloo group over all processes; a collective call."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(None)
        return cls(group or dist.new_group(backend="gloo"))

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return cast("list[T]", values)

    def from_first(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first rank, on every rank. If it raises there, every rank raises."""
        outcome = [_outcome(make) if self.first else None]
        if self.group is not None:
            dist.broadcast_object_list(outcome, group=self.group, group_src=0)
        return cast("T", _unwrap(outcome[0]))

    def together(self, work: Callable[[], T]) -> T:
        """`work()` on every rank. If it raises on some, every rank raises the error of the lowest of those."""
        outcome = _outcome(work)
        errors = self.gather(outcome[1])
        _unwrap((None, next((error for error in errors if error is not None), None)))
        return cast("T", outcome[0])


def _outcome(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _unwrap(outcome: Any) -> Any:
    value, error = outcome
    if error is not None:
        raise error
    return value
