"""The copy in CPU memory that a save is written from, and the DCP planner that plans it.

Training waits for this copy and for nothing else. Its buffers stay for the next save: fresh memory costs several times
the copy itself in page faults, and pinned memory more. From the second save on a rank copies only what it writes, not
what a replica writes for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object


class Snapshot:
    """CPU copies of this rank's part of the tensors, by name. One at a time: taking the next overwrites it."""

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}
        self.items: list[WriteItem] = []
        self._written: set[str] | None = None

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy what this rank may have to write; on return the tensors can be changed."""
        items = [item for item in create_default_local_save_plan(dict(tensors), False).items if _holds_data(item)]
        if items != self.items:
            self.items, self._written = items, None
        needed = [item for item in items if self._written is None or item.index.fqn in self._written]
        buffers, self.copies = self.copies, {}
        for item in needed:
            source = find_state_dict_object(dict(tensors), item.index)
            buffer = _buffer_for(source, buffers.get(item.index.fqn))
            self.copies[item.index.fqn] = buffer.copy_(source, non_blocking=True)
        _wait_for_copies(tensors)

    def written(self, plan: SavePlan) -> None:
        """Remember what the common plan left to this rank. The same plans give the same answer next time."""
        self._written = {item.index.fqn for item in plan.items}

    def forget(self) -> None:
        """Copy everything next time."""
        self._written = None


class SnapshotPlanner(DefaultSavePlanner):
    """DCP's planner over a snapshot. Of the replicas of a chunk one rank writes it: the one with least to do so far.

    `error` is what went wrong when the snapshot was taken; raised where DCP carries it to all ranks.
    """

    def __init__(self, snapshot: Snapshot, error: Exception | None):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.snapshot = snapshot
        self.error = error

    def create_local_plan(self) -> SavePlan:
        """What this rank holds."""
        if self.error is not None:
            raise self.error
        self.plan = SavePlan(self.snapshot.items)
        return self.plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """What this rank writes."""
        self.snapshot.written(new_plan)
        return super().finish_plan(new_plan)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The CPU copy of a chunk."""
        return self.snapshot.copies[index.fqn]


def _holds_data(item: WriteItem) -> bool:
    """Whether there is something to write: an empty shard of a tensor that has elements elsewhere is left out."""
    assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
    return math.prod(item.tensor_data.chunk.sizes) > 0 or math.prod(item.tensor_data.size) == 0


def _buffer_for(source: Tensor, old: Tensor | None) -> Tensor:
    if old is not None and old.shape == source.shape and old.dtype == source.dtype:
        return old
    return torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)


def _wait_for_copies(tensors: Mapping[str, Tensor]) -> None:
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
        copied.synchronize()
