"""Pieces of whole tensors: which box of a tensor each rank holds, and whether the boxes make up the whole, rightly.

What a layout computed is compared piece by piece in the test's own process, so that no collective of ours or torch's
stands between a fault and the comparison. Ranks that hold the same box must hold the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fivefold._torch import local_offsets

TOLERANCE = 1e-10


@dataclass(frozen=True)
class Piece:
    """A box of a whole tensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    offsets: tuple[int, ...]
    values: np.ndarray

    @property
    def box(self) -> tuple[slice, ...]:
        """Where it lies in the whole."""
        return tuple(slice(first, first + size) for first, size in zip(self.offsets, self.values.shape, strict=True))


def piece(tensor: Tensor, values: Tensor | None = None) -> Piece:
    """This rank's piece of a tensor; `values`, element for element as that piece, in its place."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    offsets = local_offsets(tensor) if isinstance(tensor, DTensor) else (0,) * tensor.ndim
    values = local if values is None else values
    assert values.shape == local.shape
    return Piece(tuple(tensor.shape), offsets, values.detach().clone().numpy())


@torch.no_grad()
def fill(tensor: Tensor, whole: Tensor) -> None:
    """Write into this rank's piece of a tensor what `whole` holds there."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local.copy_(whole[piece(tensor).box])


Pieces = Mapping[str, Piece]


def faults(kind: str, whole: Mapping[str, Tensor], ranks: Sequence[Pieces], tolerance: float) -> Iterator[str]:
    """What is wrong with the pieces of all ranks, one sentence a tensor, in the order of `whole`.

    The error is the norm of the difference over max(norm of the whole, 1e-6 of the norm of all), since some true
    gradients are zero. Where ranks hold the same box, the worst of them counts.
    """
    total = math.sqrt(sum(float(tensor.norm()) ** 2 for tensor in whole.values()))
    if missing := sorted(set(whole) - set().union(*ranks)):
        yield f"{kind} of {missing[0]} is on no rank"
    for name, tensor in whole.items():
        expected = tensor.detach().numpy()
        boxes: dict[tuple[int, ...], float] = {}
        covered = np.zeros(expected.shape, dtype=np.int8)
        for found in (rank[name] for rank in ranks if name in rank):
            if found.shape != expected.shape:
                yield f"{kind} of {name} has the shape {found.shape} and not {expected.shape}"
                return
            key = (*found.offsets, *found.values.shape)
            if found.values.size and key not in boxes:
                covered[found.box] += 1
            square = float(((found.values - expected[found.box]) ** 2).sum())
            boxes[key] = max(boxes.get(key, 0.0), square) if math.isfinite(square) else math.inf
        if not (covered == 1).all():
            yield f"{kind} of {name} is not held once: its elements are on {covered.min()} to {covered.max()} pieces"
        error = math.sqrt(sum(boxes.values())) / max(float(tensor.norm()), 1e-6 * total)
        if not error <= tolerance:
            yield f"{kind} of {name}: relative error {error:.1e}"


def differing_copies(ranks: Sequence[Pieces]) -> Iterator[str]:
    """Tensors of which two ranks hold the same box with different bytes."""
    seen: dict[tuple, tuple[int, bytes]] = {}
    for rank, pieces in enumerate(ranks):
        for name, found in pieces.items():
            content = found.values.tobytes()
            first, expected = seen.setdefault((name, found.offsets, found.values.shape), (rank, content))
            if content != expected:
                yield f"copies of {name} differ on ranks {first} and {rank}"
