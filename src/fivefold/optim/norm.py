"""The global gradient norm: local sums of squares, each shard counted once, summed over the ranks that hold shards."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold._torch import foreach_norm


def sums_of_squares(gradients: list[Tensor], copies: Tensor) -> Tensor:
    """The share of this rank in each gradient's sum of squares, shape (parameters,), in fp64.

    So many ranks hold `copies` of each piece; each counts its part of it, so that a sum over all ranks counts it once.
    An empty piece counts zero.
    """
    norms = torch.stack([norm.double() for norm in foreach_norm(gradients)])
    return norms.square() / copies
