"""The global gradient norm: local sums of squares, each shard counted once, summed over the ranks that hold shards.

Ranks of other pipeline stages have other parameters, so each puts its sums in their places in one vector of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fivefold._torch import foreach_norm
from fivefold.parallel.state import ShardedParameter


class SumsOfSquares:
    """Of the gradients of `parameters`, this rank's, among those of all `names`, the same on every rank."""

    def __init__(self, parameters: Mapping[str, ShardedParameter], names: Sequence[str]) -> None:
        device = next(iter(parameters.values())).local.device
        place = {name: number for number, name in enumerate(names)}
        self._size = len(names)
        self._places = torch.tensor([place[name] for name in parameters], device=device)
        self._copies = torch.tensor([p.copies for p in parameters.values()], dtype=torch.float64, device=device)

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        """This rank's share of all sums, (names,) in fp64 beside the gradients: its own, and 0 for what others have."""
        mine = sums_of_squares(gradients, self._copies)
        return mine.new_zeros(self._size).index_copy_(0, self._places, mine)


def sums_of_squares(gradients: list[Tensor], copies: Tensor) -> Tensor:
    """The share of this rank in each gradient's sum of squares, shape (parameters,), in fp64.

    So many ranks hold `copies` of each piece; each counts its part of it, so that a sum over all ranks counts it once.
    An empty piece counts zero.
    """
    norms = torch.stack([norm.double() for norm in foreach_norm(gradients)])
    return norms.square() / copies
