"""Layer normalization, alone and fused with the residual addition before it (Ba et al. 2016).

torch's own kernel computes the statistics in at least fp32 and is fast on every device; only the addition is fused.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.compiled import compiled_on_cuda


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension: x (..., d), weight and bias (d,)."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@compiled_on_cuda
def add_layer_norm(x: Tensor, update: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after `update`, and its norm: (x + update, layer_norm(x + update)), both (..., d)."""
    total = x + update
    return total, layer_norm(total, weight, bias, eps)
