"""One parameter's AdamW update (Loshchilov & Hutter 2019) with the gradient divided on the way.

The state is that of torch.optim.AdamW, whose fused kernel writes the divided gradient back, which nobody reads. Here
each tensor is read once, and all but the gradient are written once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    divisor: Tensor,
    found_inf: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Update `param` and its two moments in place, all of one shape and contiguous, with grad / divisor.

    `step` is the number of this update, 1 for the first; if `found_inf` is not 0, nothing changes. These two and
    `divisor` are single numbers on the device of `param`. Computed in at least fp32, and rounded once to each format.
    """
    if param.is_cuda and param.dtype != torch.float64:
        from fivefold.kernels import adamw_triton

        tensors = (param, grad, exp_avg, exp_avg_sq, step, divisor, found_inf)
        adamw_triton.adamw_(*tensors, lr, betas, eps, weight_decay)
        return
    if found_inf.item():
        return
    wide = torch.promote_types(param.dtype, torch.float32)
    p, g, m, v = (x.to(wide) for x in (param, grad, exp_avg, exp_avg_sq))
    g = g / divisor.to(wide)
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    correction1, correction2 = (1 - beta ** step.item() for beta in betas)
    p = p - lr * weight_decay * p - lr / correction1 * m / (v.sqrt() / correction2**0.5 + eps)
    for target, value in ((param, p), (exp_avg, m), (exp_avg_sq, v)):
        target.copy_(value)
