"""AdamW as one Triton kernel, for CUDA; imported when the first CUDA tensor comes."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    divisor: Tensor,
    found_inf: Tensor,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """As `fivefold.kernels.adamw.adamw_`, computed in fp32, for formats of at most that."""
    n = param.numel()
    if n:
        complements = [1.0 - beta for beta in betas]  # here, in fp64: in fp32 1 - 0.999 would be off by 3e-5 of itself
        logarithms = [math.log(beta) if beta else -math.inf for beta in betas]
        numbers = map(float, (lr, lr * weight_decay, eps, *betas, *complements, *logarithms))
        tensors = (param, grad.contiguous(), exp_avg, exp_avg_sq, step, divisor, found_inf)
        _adamw[(triton.cdiv(n, BLOCK),)](*tensors, n, *numbers, BLOCK)


@triton.jit
def _adamw(
    param, grad, exp_avg, exp_avg_sq, step, divisor, found_inf, n, lr, decay, eps, beta1, beta2, complement1,
    complement2, logarithm1, logarithm2, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    # read even if nothing will change: all would have to wait until that is known
    p = tl.load(param + place, mask=inside).to(tl.float32)
    g = tl.load(grad + place, mask=inside).to(tl.float32)
    m = tl.load(exp_avg + place, mask=inside).to(tl.float32)
    v = tl.load(exp_avg_sq + place, mask=inside).to(tl.float32)
    changed = place < tl.where(tl.load(found_inf) == 0.0, n, 0)
    count = tl.load(step).to(tl.float64)
    rate = (lr / (1.0 - tl.exp(count * logarithm1))).to(tl.float32)
    root = tl.sqrt(1.0 - tl.exp(count * logarithm2)).to(tl.float32)
    g = tl.div_rn(g, tl.load(divisor).to(tl.float32))
    p -= decay * p
    m = beta1 * m + complement1 * g
    v = beta2 * v + complement2 * g * g
    p -= tl.div_rn(rate * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(param + place, p.to(param.dtype.element_ty), mask=changed)
    tl.store(exp_avg + place, m.to(exp_avg.dtype.element_ty), mask=changed)
    tl.store(exp_avg_sq + place, v.to(exp_avg_sq.dtype.element_ty), mask=changed)
