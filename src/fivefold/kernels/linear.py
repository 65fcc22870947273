"""Matrix products of activations and weights, in the format in which the device multiplies fast.

Many CPUs have no bf16 or fp16 instructions, and torch's fallback there is 10 to 100 times slower than fp32. The product
is then computed in fp32 and rounded once, as hardware with fp32 accumulators does.

In a pipeline the gradient of a weight is added up over microbatches where it is computed, in the format in which it is
reduced. And it can wait: while a `Deferral` collects, backward computes the gradient of the input alone, and what the
weight's needs is kept for later. Source: Qi et al. 2023 (zero-bubble pipelines).
"""

# t tokens  i input width  o output width

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold._torch import cpu_multiplies


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The format in which products of `tensor` are computed: its own, or fp32 where a CPU is slow in it."""
    if tensor.device.type == "cpu" and not cpu_multiplies(tensor.dtype):
        return torch.float32
    return tensor.dtype


class Coming(Protocol):
    """A tensor that is on its way."""

    def wait(self) -> Tensor:
        """The tensor, once it is there."""


class WaitingGradient(Protocol):
    """The gradient of a weight, not computed yet."""

    @property
    def weight(self) -> Tensor:
        """The parameter that forward used, the object itself."""

    def start(self) -> None:
        """Begin to fetch what it needs, if that is elsewhere."""

    def add_to(self, totals: GradientTotals) -> None:
        """Compute, and add to the total of the weight."""


@dataclass
class WeightGradient:
    """The gradient of a linear layer's weight (and bias), not computed yet."""

    weight: Tensor
    """The parameter that forward used, the object itself: saved for backward it can come back as another."""
    bias: Tensor | None
    d_y_to: Tensor
    x_ti: Tensor
    """The layer's input, or this rank's slice of it if `fetch` brings the whole."""
    fetch: Callable[[Tensor], Coming] | None = None
    _coming: Coming | None = field(default=None, init=False)

    def start(self) -> None:
        """Begin to fetch the input, if that is needed."""
        if self.fetch is not None and self._coming is None:
            self._coming = self.fetch(self.x_ti)

    def add_to(self, totals: GradientTotals) -> None:
        """Compute, and add to the totals of weight and bias."""
        self.start()
        x_ti = self.x_ti if self._coming is None else self._coming.wait()
        totals.add_product(self.weight, self.d_y_to.T, x_ti)
        if self.bias is not None:
            totals.add(self.bias, self.d_y_to.sum(0))


class GradientTotals(Protocol):
    """Where the gradients of a step are added up. Parameters are known by their identity."""

    def add_product(self, parameter: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
        """Add scale x left @ right to the gradient of `parameter`."""

    def add_grouped_product(self, parameter: Tensor, gradients: Tensor, inputs: Tensor, ends: Tensor) -> None:
        """Add each group's gradients^T @ inputs to the gradient of its matrix in `parameter` (groups, o, i)."""

    def add_rows(self, parameter: Tensor, rows: Tensor, gradients: Tensor) -> None:
        """Add each of `gradients` to the row of `parameter`'s gradient that it is for; a row may come repeatedly."""

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add `gradient` to that of `parameter`."""


class Deferral:
    """Given to each layer of a stage that has large weights: their gradients come here, and are computed now or later.

    An object and no context variable: on CUDA backward runs in another thread.
    """

    def __init__(self) -> None:
        self._collected: list[WaitingGradient] | None = None
        self.totals: GradientTotals | None = None
        """Where the gradients are added up; set when the stage is put together."""
        self.loss_scale = 1.0
        """What the loss of a microbatch will be multiplied by: the head computes its weight's gradient in forward."""

    def announce(self, gradient: WaitingGradient) -> None:
        """Say that a gradient is to be put soon, so that what it needs can be on its way."""
        if self._collected is None:
            gradient.start()

    def put(self, gradient: WaitingGradient) -> None:
        """Take a gradient: keep it while collecting, else compute it."""
        if self._collected is not None:
            self._collected.append(gradient)
        else:
            gradient.add_to(self.sums)

    @property
    def sums(self) -> GradientTotals:
        """The totals, which are there once the stage is put together."""
        assert self.totals is not None, "the stage has its totals before its first backward"
        return self.totals

    @contextmanager
    def collect(self) -> Iterator[list[WaitingGradient]]:
        """Let the weight gradients of the backward inside wait; they are in the list afterwards."""
        collected: list[WaitingGradient] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, deferral: Deferral | None = None) -> Tensor:
    """x (..., i) @ weight (o, i)^T + bias (o,) -> (..., o), in the format of x.

    With a deferral x is (t, i), and the gradients of weight and bias go there.
    """
    if deferral is not None and torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias, deferral)
    wide = product_dtype(x)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).to(x.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None, deferral: Deferral) -> Tensor:
        ctx.save_for_backward(x_ti, weight_oi)
        ctx.parameters, ctx.deferral = (weight_oi, bias_o), deferral
        return linear(x_ti, weight_oi, bias_o)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y_to: Tensor):
        x_ti, weight_oi = ctx.saved_tensors
        d_x_ti = multiply(d_y_to, weight_oi) if ctx.needs_input_grad[0] else None
        weight, bias = ctx.parameters
        ctx.deferral.put(WeightGradient(weight, bias, d_y_to, x_ti))
        return d_x_ti, None, None, None


def wide_linear(x_ti: Tensor, weight_oi: Tensor) -> Tensor:
    """x @ weight^T (t, o) in at least fp32, not rounded to the format of x."""
    wide = torch.promote_types(x_ti.dtype, torch.float32)
    if x_ti.is_cuda and x_ti.dtype != wide:
        return _WideLinear.apply(x_ti, weight_oi)
    return F.linear(x_ti.to(wide), weight_oi.to(wide))


class _WideLinear(torch.autograd.Function):
    """The products of 16-bit factors as a GPU adds them up; gradients are rounded as in any other layer."""

    @staticmethod
    def forward(ctx, x_ti: Tensor, weight_oi: Tensor) -> Tensor:
        ctx.save_for_backward(x_ti, weight_oi)
        return torch.mm(x_ti, weight_oi.T, out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y_to: Tensor):
        x_ti, weight_oi = ctx.saved_tensors
        d_y_to = d_y_to.to(x_ti.dtype)
        return d_y_to @ weight_oi, d_y_to.T @ x_ti


def look_up(tokens_t: Tensor, weight_vi: Tensor, deferral: Deferral | None = None) -> Tensor:
    """The row of the weight of each token, (t, i).

    With a deferral the gradient goes there, row by row, and no table of the weight's size is made for each microbatch.
    """
    if deferral is not None and torch.is_grad_enabled():
        return _LookUp.apply(tokens_t, weight_vi, deferral)
    return F.embedding(tokens_t, weight_vi)


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens_t: Tensor, weight_vi: Tensor, deferral: Deferral) -> Tensor:
        ctx.save_for_backward(tokens_t)
        ctx.weight, ctx.deferral = weight_vi, deferral
        return F.embedding(tokens_t, weight_vi)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y_ti: Tensor):
        (tokens_t,) = ctx.saved_tensors
        ctx.deferral.sums.add_rows(ctx.weight, tokens_t, d_y_ti)
        return None, None, None


def multiply(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left (a, k) @ right (k, b) -> (a, b), in the format of left; in `out` if it is given."""
    wide = product_dtype(left)
    if wide == left.dtype:
        return torch.mm(left, right, out=out)
    product = (left.to(wide) @ right.to(wide)).to(left.dtype)
    return product if out is None else out.copy_(product)


def add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """total + scale x left (a, k) @ right (k, b), in place; without a total, a new one.

    The total has the format `dtype`, which may be wider than the factors': the product is then not rounded to theirs on
    a GPU, nor where a CPU is slow in it.
    """
    beta = 0.0 if total is None else 1.0
    total = left.new_empty(len(left), right.shape[1], dtype=dtype) if total is None else total
    wide = product_dtype(left)
    if left.dtype != dtype and left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=dtype, beta=beta, alpha=scale, out=total)
    if wide == dtype:
        return total.addmm_(left.to(wide), right.to(wide), beta=beta, alpha=scale)
    product = (left.to(wide) @ right.to(wide)).mul_(scale).to(dtype)
    return total.add_(product) if beta else total.copy_(product)
