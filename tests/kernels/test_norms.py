"""Norms against their formulas, and the fused residual addition against the two steps it replaces."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from fivefold.kernels.layer_norm import add_layer_norm, layer_norm
from fivefold.kernels.rms_norm import add_rms_norm, rms_norm

EPS = 1e-5


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 8), (2, 3, 8), (8,), (8,)]
    x, update, weight, bias = (torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)
    return tuple(t.to(dtype).requires_grad_() for t in (x, update, weight, bias))  # type: ignore[return-value]


def rms_formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def layer_formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


def test_rms_norm_is_its_formula() -> None:
    x, _, weight, _ = inputs()
    torch.testing.assert_close(rms_norm(x, weight, EPS), rms_formula(x, weight), rtol=1e-12, atol=1e-12)


def test_layer_norm_is_its_formula_with_and_without_bias() -> None:
    x, _, weight, bias = inputs()
    torch.testing.assert_close(layer_norm(x, weight, bias, EPS), layer_formula(x, weight, bias), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer_norm(x, weight, None, EPS), layer_formula(x, weight, 0 * bias), rtol=1e-12, atol=0)


def test_adding_first_gives_the_sum_and_its_norm() -> None:
    x, update, weight, bias = inputs()
    total, normed = add_rms_norm(x, update, weight, EPS)
    assert torch.equal(total, x + update)
    assert torch.equal(normed, rms_norm(x + update, weight, EPS))
    total, normed = add_layer_norm(x, update, weight, bias, EPS)
    assert torch.equal(total, x + update)
    assert torch.equal(normed, layer_norm(x + update, weight, bias, EPS))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, update, weight, bias: rms_norm(x, weight, EPS),
        lambda x, update, weight, bias: layer_norm(x, weight, bias, EPS),
        lambda x, update, weight, bias: add_rms_norm(x, update, weight, EPS),
        lambda x, update, weight, bias: add_layer_norm(x, update, weight, bias, EPS),
    ],
)
def test_gradients_equal_finite_differences(function: Callable[..., Tensor]) -> None:
    assert gradcheck(function, inputs())


def test_bf16_statistics_are_computed_wide() -> None:
    """In bf16 the mean of 4,096 squares would be off by percents."""
    x = (torch.randn(4, 4096, generator=torch.Generator().manual_seed(0)) * 30).bfloat16()
    weight = torch.ones(4096, dtype=torch.bfloat16)
    wide = rms_formula(x.double(), weight.double())
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), wide, rtol=2**-7, atol=1e-3)
    wide = layer_formula(x.double(), weight.double(), 0 * weight.double())
    torch.testing.assert_close(layer_norm(x, weight, None, EPS).double(), wide, rtol=2**-7, atol=1e-3)
