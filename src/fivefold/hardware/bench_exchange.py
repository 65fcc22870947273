"""Timing what ranks exchange: each collective inside a node in several sizes, and the network between nodes.

The process group exists already. Sizes are counted as `fivefold.plan.time.network` counts them. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fivefold.hardware.accelerator import Collective
from fivefold.hardware.stopwatch import Stopwatch

_all_gather, _reduce_scatter = (
    getattr(dist, new if hasattr(dist, new) else old)
    for new, old in (
        ("all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter_single", "reduce_scatter_tensor"),
    )
)
"""torch 2.13 gives two collectives new names."""
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send")
GPU_MIB, CPU_MIB = (1.0, 32.0, 512.0), (1 / 16, 4.0)
NETWORK_MIB_ON_GPU, NETWORK_MIB_ON_CPU = 256.0, 4.0


def collectives(watch: Stopwatch, per_node: int) -> list[Collective]:
    """Each kind among the ranks of a node, in several sizes; nothing where a node has one rank. All ranks call it."""
    if per_node < 2:
        return []
    group = _own_group([list(range(first, first + per_node)) for first in range(0, dist.get_world_size(), per_node)])
    sizes = GPU_MIB if watch.device.type == "cuda" else CPU_MIB
    return [
        Collective(kind, per_node, work_bytes, watch.seconds(_work(kind, work_bytes, group, watch.device)))
        for kind in KINDS
        for work_bytes in (mib * 2**20 for mib in sizes)
    ]


def network(watch: Stopwatch, per_node: int) -> float | None:
    """bytes/s of one rank to and from other nodes while the others of its node do the same; None within one node.

    The ranks with the same number on their nodes all-gather, all such groups at once.
    """
    world = dist.get_world_size()
    if world <= per_node:
        return None
    group = _own_group([list(range(first, world, per_node)) for first in range(per_node)])
    nodes = dist.get_world_size(group)
    size = (NETWORK_MIB_ON_GPU if watch.device.type == "cuda" else NETWORK_MIB_ON_CPU) * 2**20
    return size * (nodes - 1) / nodes / watch.seconds(_work("all-gather", size, group, watch.device))


def _own_group(parts: list[list[int]]) -> dist.ProcessGroup:
    """This rank's one of groups that together hold all ranks."""
    own, _ = dist.new_subgroups_by_enumeration(parts)
    assert own is not None, "every rank is in a group"
    return own


def _work(kind: str, size: float, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """One collective of `size` bytes."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    share = max(1, int(size / 4 / ranks))
    whole = torch.zeros(share * ranks, device=device)
    if kind == "all-reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "reduce-scatter":
        part = torch.empty(share, device=device)
        return lambda: _reduce_scatter(part, whole, group=group)
    if kind == "all-gather":
        part = torch.empty(share, device=device)
        return lambda: _all_gather(whole, part, group=group)
    if kind == "all-to-all":
        received = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group)
    partner = rank ^ 1  # 0 sends to 1, 2 to 3, all at once
    if partner >= ranks:
        return lambda: None
    other = dist.get_global_rank(group, partner)
    if rank % 2 == 0:
        return lambda: dist.send(whole, other, group=group)
    return lambda: dist.recv(whole, other, group=group)
