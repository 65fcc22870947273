"""Rotary position embedding: each pair of a head's channels is turned by an angle proportional to the position.

Pairs are (i, i + half), as in Hugging Face's models. The angles are computed and applied in at least fp32: in bf16
the angle of position 1,000 would be off by whole radians. Source: Su et al. 2021 (RoFormer).
"""

# b sequences  s positions  n heads  e head size (half of it angles)

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.kernels.compiled import compiled_on_cuda


def rotation(positions: Tensor, frequencies: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position x frequency, times `scale`: (..., s) and (e / 2,) -> two of (..., s, e / 2)."""
    angles = positions.to(frequencies.dtype)[..., None] * frequencies
    return angles.cos() * scale, angles.sin() * scale


@compiled_on_cuda
def rotate(q_bsne: Tensor, k_bsme: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by their positions' angles; cos and sin (s, e / 2), or (b, s, e / 2) if rows differ."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return _turn(q_bsne, cos, sin), _turn(k_bsme, cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.to(torch.promote_types(x.dtype, cos.dtype)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
