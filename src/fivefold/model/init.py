"""Initial weights as a function of (seed, parameter name, global index): every layout starts from the same numbers.

Each element hashes its own number, so a rank fills its shard without knowing of the others, and nothing depends on
the order in which parameters are made. The hash is SplitMix64 (Steele et al. 2014), the normal numbers come from
Box & Muller 1958 in fp64, rounded once to the weight's format.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fivefold._torch import local_offsets
from fivefold.config.run import Model

BLOCK = 2**20
"""Elements computed at a time: 8 MiB for each of about five temporaries."""
RESIDUAL = ("attention.output.weight", "ffn.down.weight", "ffn.shared.down.weight", "ffn.experts.down")
"""Projections back to the residual stream; their number grows with depth, so their size falls (Radford et al. 2019)."""


@torch.no_grad()
def initialize(parameters: Mapping[str, Tensor], config: Model, seed: int) -> None:
    """Fill every parameter, and what else is kept, by its name, in place; of a DTensor, this rank's shard.

    Matrices get normal(0, init_std), those that end in one of RESIDUAL init_std / sqrt(2 layers); norm weights 1;
    biases 0; the load that routers remember is even.
    """
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            _local(parameter).zero_()
        elif name.endswith("router.load"):
            parameter.fill_(1 / len(parameter))
        elif parameter.ndim == 1:
            _local(parameter).fill_(1.0)
        else:
            residual = name.endswith(RESIDUAL)
            fill_normal(parameter, config.init_std / (math.sqrt(2 * config.layers) if residual else 1.0), seed, name)


@torch.no_grad()
def fill_normal(parameter: Tensor, std: float, seed: int, name: str) -> None:
    """Fill with normal(0, std) numbers that depend on the seed, the name and each element's global index alone."""
    strides = _row_major_strides(parameter.shape)
    offsets = local_offsets(parameter) if isinstance(parameter, DTensor) else (0,) * parameter.ndim
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little", signed=True)
    for block, start in _blocks(_local(parameter), first, strides):
        block.copy_(normal(_indices(block, start, strides[-block.ndim :]), key) * std)


def normal(index: Tensor, key: int) -> Tensor:
    """Standard normal numbers in fp64, one for each int64 of `index`, which is used up."""
    bits = _splitmix64(index, key)
    first = ((_shift_right(bits, 32)).double() + 0.5) * 2.0**-32  # in (0, 1)
    second = (bits & 0xFFFFFFFF).double() * 2.0**-32  # in [0, 1)
    return first.log_().mul_(-2).sqrt_().mul_(second.mul_(2 * math.pi).cos_())


def _splitmix64(index: Tensor, key: int) -> Tensor:
    """64 well mixed bits for each index; integer overflow wraps, as it should."""
    z = index.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    z = (z ^ _shift_right(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z = (z ^ _shift_right(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return z ^ _shift_right(z, 31)


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """A shift that brings in zeros; torch's repeats the sign."""
    return (bits >> places) & (2 ** (64 - places) - 1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _blocks(local: Tensor, first: int, strides: tuple[int, ...]) -> Iterator[tuple[Tensor, int]]:
    """Views of at most BLOCK elements that cover `local`, each with the global index of its first element."""
    if local.numel() <= BLOCK:
        if local.numel():
            yield local, first
    elif len(local) == 1:
        yield from _blocks(local[0], first, strides[1:])
    else:
        rows = max(1, BLOCK * len(local) // local.numel())
        for row in range(0, len(local), rows):
            yield from _blocks(local[row : row + rows], first + row * strides[0], strides)


def _indices(block: Tensor, start: int, strides: tuple[int, ...]) -> Tensor:
    """The global index of each element of a block."""
    index = torch.full([1] * block.ndim, start, dtype=torch.int64, device=block.device)
    for dimension, (size, stride) in enumerate(zip(block.shape, strides, strict=True)):
        along = torch.arange(size, dtype=torch.int64, device=block.device) * stride
        index = index + along.view([-1 if d == dimension else 1 for d in range(block.ndim)])
    return index


def _row_major_strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
