"""Rotary position embedding: each pair of a head's channels is turned by an angle proportional to the position.

Pairs are (i, i + half), as in Hugging Face's models. The angles are computed and applied in at least fp32: in bf16
the angle of position 1,000 would be off by whole radians. Source: Su et al. 2021 (RoFormer).
"""

# b sequences  s positions  h query heads  g key/value heads  e head size

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.kernels.compiled import compiled_on_cuda


def rotation(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """What `rotate` multiplies by, in the format of the frequencies: (..., s) and (e / 2,) -> two tables (..., s, e).

    Cosine of position x frequency for both halves of a head, and sine, negative for the first half; both times `scale`.
    """
    angles = positions.to(frequencies.dtype)[..., None] * frequencies
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


@compiled_on_cuda
def rotate(q_bshe: Tensor, k_bsge: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by their positions' angles; cos and sin (s, e), or (b, s, e) if rows differ."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return turn(q_bshe, cos, sin), turn(k_bsge, cos, sin)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(first, second) cos + (second, first) (-sin, sin), over whole heads: half as long as in halves on a CPU.

    The tables' shapes are broadcast to that of x (..., e).
    """
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    return (wide * cos + wide.roll(x.shape[-1] // 2, dims=-1) * sin).to(x.dtype)
