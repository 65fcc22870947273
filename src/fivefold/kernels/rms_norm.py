"""Root-mean-square normalization, alone and fused with the residual addition before it (Zhang & Sennrich 2019).

The statistics are computed in at least fp32. On CUDA each function is one kernel forward.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.compiled import compiled_on_cuda


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: x (..., d), weight (d,)."""
    return F.rms_norm(x, weight.shape, weight, eps)


@compiled_on_cuda
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension: x (..., d), weight (d,) -> (..., d)."""
    return reference(x, weight, eps)


@compiled_on_cuda
def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after `update`, and its norm: (x + update, rms_norm(x + update)), both (..., d)."""
    total = x + update
    return total, reference(total, weight, eps)
