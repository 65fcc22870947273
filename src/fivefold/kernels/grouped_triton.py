"""Zeros for the experts that got no rows, on CUDA; imported when the first CUDA tensor comes.

torch's grouped product leaves the weight gradient of such an expert as it found the memory. Which experts they are is
known on the device alone, so that every expert is visited, and most visits return at once.
"""

# e experts  o output width  i input width

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
VISITS = 32
"""Programs an expert, which share out its elements."""


def zero_empty_(gradient_eoi: Tensor, ends_e: Tensor) -> Tensor:
    """Set the slices of the experts without rows to zero, in place; the gradient must be contiguous."""
    _zero_empty[(len(ends_e), VISITS)](gradient_eoi, ends_e, gradient_eoi[0].numel(), VISITS, BLOCK)
    return gradient_eoi


@triton.jit
def _zero_empty(gradient, ends, size, VISITS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if tl.load(ends + expert) == start:
        first = tl.program_id(1).to(tl.int64) * BLOCK
        for offset in range(first, size, VISITS * BLOCK):
            place = offset + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], dtype=gradient.dtype.element_ty)
            tl.store(gradient + expert.to(tl.int64) * size + place, zeros, mask=place < size)
