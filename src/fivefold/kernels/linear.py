"""Matrix products of activations and weights, in the format in which the device multiplies fast.

Many CPUs have no bf16 or fp16 instructions, and torch's fallback there is 10 to 100 times slower than fp32. The product
is then computed in fp32 and rounded once, as hardware with fp32 accumulators does.

The gradient of a weight can wait: while a `Deferral` collects, backward computes the gradient of the input alone, and
what the weight's needs is kept for later. Source: Qi et al. 2023 (zero-bubble pipelines).
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
        """Compute, and add to what there is of the weight's gradient and the bias's."""
        self.start()
        x_ti = self.x_ti if self._coming is None else self._coming.wait()
        totals.add_product(self.weight, self.d_y_to.T, x_ti)
        if self.bias is not None:
            totals.add(self.bias, self.d_y_to.sum(0))


class GradientTotals(Protocol):
    """Where gradients are added up."""

    def add_product(self, parameter: Tensor, left: Tensor, right: Tensor) -> None:
        """Add left @ right to the gradient of `parameter`."""

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add `gradient` to that of `parameter`."""


class Deferral:
    """Given to each linear layer of a stage: says whether its weight gradients wait, and keeps those that do.

    An object and no context variable: on CUDA backward runs in another thread.
    """

    def __init__(self) -> None:
        self._collected: list[WeightGradient] | None = None

    @property
    def collecting(self) -> bool:
        """Whether weight gradients wait."""
        return self._collected is not None

    def put(self, gradient: WeightGradient) -> None:
        """Keep a gradient for later."""
        assert self._collected is not None, "put only while collecting"
        self._collected.append(gradient)

    @contextmanager
    def collect(self) -> Iterator[list[WeightGradient]]:
        """Let the weight gradients of the backward inside wait; they are in the list afterwards."""
        collected: list[WeightGradient] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, deferral: Deferral | None = None) -> Tensor:
    """x (..., i) @ weight (o, i)^T + bias (o,) -> (..., o), in the format of x.

    With a deferral x is (t, i), and the gradients of weight and bias wait while it collects.
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
        if ctx.deferral.collecting:
            weight, bias = ctx.parameters
            ctx.deferral.put(WeightGradient(weight, bias, d_y_to, x_ti))
            return d_x_ti, None, None, None
        return d_x_ti, multiply(d_y_to.T, x_ti), d_y_to.sum(0) if ctx.needs_input_grad[2] else None, None


def multiply(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left (a, k) @ right (k, b) -> (a, b), in the format of left; in `out` if it is given."""
    wide = product_dtype(left)
    if wide == left.dtype:
        return torch.mm(left, right, out=out)
    product = (left.to(wide) @ right.to(wide)).to(left.dtype)
    return product if out is None else out.copy_(product)


def add_product(total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """total + left (a, k) @ right (k, b), in place, or the product if there is no total; total has the format `dtype`,

    which may be wider than the factors'; the product is then not rounded in between on a GPU, or where a CPU is slow in
    the factors' format.
    """
    narrow = left.dtype != dtype
    if total is None:
        if narrow and left.is_cuda:
            return torch.mm(left, right, out_dtype=dtype)
        return _product(left, right, dtype)
    if not narrow and product_dtype(left) == dtype:
        return total.addmm_(left, right)
    if narrow and left.is_cuda:
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    return total.add_(_product(left, right, dtype))


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    wide = product_dtype(left)
    return (left.to(wide) @ right.to(wide)).to(dtype)
