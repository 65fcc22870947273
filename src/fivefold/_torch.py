"""Every private name of torch that Fivefold uses, in one place; a test fails when torch changes one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, in few kernels, in at least fp32."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by `factor`, in place, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has fast matrix products in `dtype`; many have no bf16 or fp16 instructions."""
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


def local_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's shard starts in the global tensor, in each dimension, whatever the placements."""
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)


def divides_in_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernel reads `grad_scale` and `found_inf`, as torch.amp.GradScaler sets them."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)
