"""Matrix products of activations and weights, in the format in which the device multiplies fast.

Many CPUs have no bf16 or fp16 instructions, and torch's fallback there is 10 to 100 times slower than fp32. The product
is then computed in fp32 and rounded once, as hardware with fp32 accumulators does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold._torch import cpu_multiplies


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The format in which products of `tensor` are computed: its own, or fp32 where a CPU is slow in it."""
    if tensor.device.type == "cpu" and not cpu_multiplies(tensor.dtype):
        return torch.float32
    return tensor.dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., i) @ weight (o, i)^T + bias (o,) -> (..., o), in the format of x."""
    wide = product_dtype(x)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


def multiply(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left (a, k) @ right (k, b) -> (a, b), in the format of left; in `out` if it is given."""
    wide = product_dtype(left)
    if wide == left.dtype:
        return torch.mm(left, right, out=out)
    product = (left.to(wide) @ right.to(wide)).to(left.dtype)
    return product if out is None else out.copy_(product)
