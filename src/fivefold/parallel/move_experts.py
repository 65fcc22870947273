"""Moving experts between the ranks that hold them: rows of weights and moments travel to their new slots.

A rank holds whole rows of a tensor of experts, or a part of the width of each; rows go between the ranks that hold the
same part. One uneven all-to-all a tensor, over all ranks of a stage, of which most send each other nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fivefold.parallel.mesh import Mesh
from fivefold.parallel.placement import Placement


@torch.no_grad()
def move_experts(tensor: DTensor, before: Placement, after: Placement, mesh: Mesh) -> None:
    """In place: each expert's row of `tensor` (E, ...) goes from its slot in `before` to its slot in `after`.

    A collective call of all ranks of a stage. What lies in CPU memory travels by way of the device, a tensor at a time.
    """
    local, stage = tensor.to_local(), mesh.stage
    holders = _holders(tensor)
    first = holders.index(mesh.rank) if mesh.rank in holders else 0  # of its rows, which follow each other
    moves = list(zip(before, after, strict=True))
    leaving = sorted((holders[new], new, old - first) for old, new in moves if holders[old] == mesh.rank)
    coming = sorted((holders[old], new - first) for old, new in moves if holders[new] == mesh.rank)
    send = _counts([target for target, *_ in leaving], stage.size)
    receive = _counts([source for source, _ in coming], stage.size)
    rows = local[_index([row for *_, row in leaving], local)].to(mesh.device)
    arrived = stage.start_all_to_all(rows, send, receive).wait()
    local.index_copy_(0, _index([row for _, row in coming], local), arrived.to(local.device))


def _holders(tensor: DTensor) -> list[int]:
    """Of each row of a tensor, the rank that holds the part of it that this rank holds of its own rows."""
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    assert here is not None, "this rank is in its own mesh"
    cuts_rows = [placement == Shard(0) for placement in tensor.placements]
    place = tuple(slice(None) if cuts else here[axis] for axis, cuts in enumerate(cuts_rows))
    return list(_shared_out(len(tensor), mesh.mesh[place]))


def _shared_out(rows: int, ranks: Tensor) -> Iterator[int]:
    """The rank of each row, where each axis of `ranks` cuts what the one before left, as torch.chunk does."""
    if not ranks.ndim:
        yield from [int(ranks)] * rows
        return
    most = -(-rows // len(ranks))
    for number, some in enumerate(ranks):
        yield from _shared_out(max(0, min(most, rows - number * most)), some)


def _counts(ranks: Sequence[int], size: int) -> list[int]:
    """How many of `ranks`, which are numbers in the world, are each rank of a stage of `size`."""
    counts = Counter(rank % size for rank in ranks)
    return [counts[rank] for rank in range(size)]


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=like.device)
