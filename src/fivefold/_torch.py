"""Every private name of torch that Fivefold uses, in one place; a test fails when torch changes one."""

from __future__ import annotations

import torch
from torch import Tensor


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, in few kernels, in at least fp32."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by `factor`, in place, in few kernels."""
    torch._foreach_mul_(tensors, factor)
