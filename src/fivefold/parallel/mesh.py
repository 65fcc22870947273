"""The ranks of a run: which process this is, on which device, and the groups it talks to.

A `Mesh` is made once, by `connect`, and passed to whoever needs a group: there is no global state of ours. What each
rank is stands in `grid.py`. Parameters live on the device mesh `dense` with the axes (tp, replicate, shard), over the
ranks with the same stages of pp: tp cuts a parameter first and shard cuts what is left, so that a shard is a contiguous
piece. The ranks of cp hold the same weights, so they are shards too. Experts live on another mesh over the same ranks,
`experts`, with the axes (ep, replicate, shard): ep shares them out, innermost ranks first, and each has all the others
as replicas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fivefold._torch import abort_groups
from fivefold.config.run import Parallel
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_driver_name
from fivefold.hardware.node import filled, ranks_of_node
from fivefold.parallel.axis import ALONE, Axis
from fivefold.parallel.grid import Grid
from fivefold.parallel.links import NO_LINKS, Links
from fivefold.parallel.rendezvous import RENDEZVOUS
from fivefold.parallel.stopwatch import Stopwatch

T = TypeVar("T")

LINK_BLOCKS = 8
"""Blocks of a GPU that a transfer between pipeline ranks takes at most: on an H200 a waiting one slows a matrix product
by 8 %, as 4 do, and 32 MiB take 0.25 ms, against 0.49 with 4; 16 take 0.14 ms, slow it by 13 % and need more memory."""
LINK_TIMEOUT = timedelta(minutes=10)
"""After which a rank says what it waits for; torch's own differ between NCCL and gloo."""


@dataclass(frozen=True)
class Mesh:
    """One rank's view of the world."""

    rank: int
    world: int
    device: torch.device
    grid: Grid
    dense: DeviceMesh  # (tp, replicate, shard); the ranks of cp are among shard, or with ZeRO 0 among replicate
    parallel: Parallel
    tp: Axis
    cp: Axis
    pp: Links
    near: int
    """Ranks next to each other in the numbering that need no network between them: a node's."""

    @property
    def dp(self) -> int:
        """Shares of a batch."""
        return self.grid.dp

    @property
    def dp_rank(self) -> int:
        """Which of the `dp` shares of a batch this rank works on."""
        return self.grid.dp_rank(self.rank)

    @cached_property
    def experts(self) -> DeviceMesh:
        """(ep, replicate, shard) of this rank's stages; all replicas are shard, or with ZeRO 0 replicate.

        Made at the first call, which is a collective one: a dense model has none.
        """
        stage = self.world // self.grid.pp
        copies, ep = stage // self.parallel.ep, self.parallel.ep
        over = (copies, 1) if self.parallel.zero == 0 else (1, copies)
        ranks = torch.arange(self.world).view(self.grid.pp, *over, ep)
        return _device_mesh(ranks.permute(0, 3, 1, 2), "ep", self.dense.device_type)

    @cached_property
    def ep(self) -> Axis:
        """The ranks that share out the experts, whose transfers are timed; as `experts`."""
        ep = self.parallel.ep
        if ep == 1:
            return ALONE
        return Axis(ep, self.rank % ep, self.experts["ep"].get_group(), Stopwatch(self.device))

    @cached_property
    def ep_near(self) -> int:
        """Ranks of ep that need no network between them, as all of them know; all of ep if they know it differently.

        The first call is a collective one.
        """
        least, most = self.ep.max_(torch.tensor([-self.near, self.near], device=self.dense.device_type)).tolist()
        return most if -least == most else self.ep.size

    @cached_property
    def ep_by_node(self) -> tuple[Axis, Axis]:
        """The ranks of ep in two axes: those of the same place in each node, and those of the node; as `experts`."""
        ep, near = self.ep, self.ep_near
        first = self.rank - ep.rank
        of_node = range(first + ep.rank // near * near, first + ep.size)[:near]
        across = range(first + ep.rank % near, first + ep.size, near)
        return (
            Axis(len(across), across.index(self.rank), _ranks(across, "ep_nodes"), ep.stopwatch),
            Axis(near, of_node.index(self.rank), _ranks(of_node, "ep_node"), ep.stopwatch),
        )

    @cached_property
    def stage(self) -> Axis:
        """All ranks that have this rank's stages, in their order. Made at the first call, which is a collective one."""
        size = self.world // self.grid.pp
        if size == 1:
            return ALONE
        first = self.rank // size * size
        return Axis(size, self.rank - first, _ranks(range(first, first + size), "stage"))

    @property
    def counts(self) -> bool:
        """Whether this rank counts what all ranks that share its sequences know: one of them does."""
        return self.tp.rank == 0 and self.cp.rank == 0

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over all ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.SUM)
        return values

    def max(self, values: Tensor) -> Tensor:
        """The largest of each of `values` over all ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def from_main(self, work: Callable[[], T]) -> T:
        """What `work` gives on the main rank, on every rank; it must be picklable.

        If it fails there, the main rank raises its exception and the others leave quietly with the same exit code, so
        that a message is printed once.
        """
        box: list[Any] = [None, None]
        failure: Exception | None = None
        if self.is_main:
            try:
                box[0] = work()
            except Exception as error:
                failure, box[1] = error, getattr(error, "exit_code", 1)
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        if failure is not None:
            raise failure
        if box[1] is not None:
            raise SystemExit(box[1])
        return box[0]


@contextmanager
def connect(parallel: Parallel, timeout: timedelta = timedelta(minutes=10)) -> Iterator[Mesh]:
    """Join the other ranks, as `joined`, in a layout that fits their number."""
    with joined(timeout) as device:
        yield mesh_of(parallel, device)


@contextmanager
def joined(timeout: timedelta = timedelta(minutes=10)) -> Iterator[torch.device]:
    """Join the other ranks, as the environment (RANK, WORLD_SIZE, LOCAL_RANK) says; alone without it.

    Gives this rank's device. Leaves the group at the end, after a barrier if all went well.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = _local_device()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout, **_rendezvous(rank, world))
    try:
        yield device
        dist.barrier()
    except BaseException:
        # NCCL's transfers never end when the other side is gone, and leaving in good order would wait for them.
        abort_groups() if device.type == "cuda" else dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def mesh_of(parallel: Parallel, device: torch.device, near: int | None = None) -> Mesh:
    """The mesh of a layout over the processes that are connected already; a collective call.

    `near` is a node's ranks; by default what the launcher says, or what the GPU's links join if they reach over nodes.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    grid = Grid.of(parallel, world)
    together = grid.dp * grid.cp  # ranks that compute with the same weights
    replicate = together if parallel.zero == 0 else grid.replicate
    ranks = torch.arange(world).view(grid.pp, replicate, together // replicate, grid.tp)
    dense = _device_mesh(ranks.permute(0, 3, 1, 2), "tp", device.type)
    role = grid.role(rank)
    tp = Axis(grid.tp, role.tp, dense["tp"].get_group()) if grid.tp > 1 else ALONE
    cp = Axis(grid.cp, role.cp, _group(grid, "cp")) if grid.cp > 1 else ALONE
    pp = Links(role.pp, grid.pp, _link(grid, device), _link(grid, device)) if grid.pp > 1 else NO_LINKS
    return Mesh(rank, world, device, grid, dense, parallel, tp, cp, pp, near or _near(world, device))


def _near(world: int, device: torch.device) -> int:
    """Ranks that need no network between them, as far as is known; all, if nothing says."""
    node = ranks_of_node(world)
    accelerator = by_driver_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if accelerator is None or not accelerator.spans_nodes:
        return node
    return filled(accelerator.domain, node, world)


def _device_mesh(ranks: Tensor, cut: str, device: str) -> DeviceMesh:
    """Of `ranks` (pp, cut, replicate, shard), this rank's part in one stage of pp."""
    axes = ("pp", cut, "replicate", "shard")
    ordered = ranks.flatten().view(ranks.shape)  # strides of one element too, by which torch 2.11 knows the axes' order
    return DeviceMesh(device, ordered, mesh_dim_names=axes)[axes[1:]]


def _group(grid: Grid, axis: str, **options: Any) -> dist.ProcessGroup:
    """This rank's group along `axis`."""
    return _ranks(grid.peers(dist.get_rank(), axis), axis, **options)


def _ranks(peers: Sequence[int], name: str, **options: Any) -> dist.ProcessGroup:
    """The group of these ranks, which alone make it: in a large world others would be made for long."""
    return dist.new_group(list(peers), use_local_synchronization=True, group_desc=name, **options)


def _link(grid: Grid, device: torch.device) -> dist.ProcessGroup:
    """This rank's group along pp. Its transfers take few of a GPU's blocks: a receive spins on them while it waits."""
    if device.type != "cuda":
        return _group(grid, "pp", timeout=LINK_TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = LINK_BLOCKS
    return _group(grid, "pp", pg_options=options, timeout=LINK_TIMEOUT)


def _local_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", gpu_number(torch.cuda.device_count()))
    torch.cuda.set_device(device)
    return device


def gpu_number(visible: int) -> int:
    """Which of this process's GPUs is its own. A scheduler may show each task its GPU alone, which then has number 0.

    Raises UserError if there are fewer GPUs than ranks.
    """
    local = int(os.environ.get("LOCAL_RANK", 0))
    shown_alone = visible == 1 and RENDEZVOUS not in os.environ
    if local >= visible and not shown_alone:
        raise UserError(
            f"rank {local} of this machine has no GPU: {visible} can be seen; start {visible} workers here, or hide "
            "the GPUs (CUDA_VISIBLE_DEVICES='') to train on CPUs"
        )
    return 0 if shown_alone else local


def _rendezvous(rank: int, world: int) -> dict[str, Any]:
    """Where the ranks meet: a file of the local launcher, nowhere if alone, else MASTER_ADDR and MASTER_PORT.

    Raises UserError if nothing says where.
    """
    if RENDEZVOUS in os.environ:
        return {"store": dist.FileStore(os.environ[RENDEZVOUS], world)}
    if world == 1 and "MASTER_ADDR" not in os.environ:
        return {"store": dist.HashStore()}
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UserError(
            f"RANK {rank} and WORLD_SIZE {world} are set, but not {' and '.join(missing)}, where the ranks meet; start "
            "with torchrun, or with --launcher local for workers of this machine alone"
        )
    return {"init_method": "env://"}
