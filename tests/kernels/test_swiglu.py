"""The gated activation on alternate columns."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from fivefold.kernels.swiglu import reference, swiglu


def test_even_columns_are_the_gate_and_odd_ones_the_up_projection() -> None:
    gate, up = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    alternate = torch.stack([gate, up], dim=-1).flatten(-2)
    assert torch.equal(swiglu(alternate), F.silu(gate) * up)


def test_gradients_equal_finite_differences() -> None:
    assert gradcheck(swiglu, torch.randn(3, 8, dtype=torch.float64, requires_grad=True))


def test_bf16_is_within_its_rounding_of_float64() -> None:
    x = torch.randn(64, 32).bfloat16()
    torch.testing.assert_close(swiglu(x).double(), swiglu(x.double()), rtol=2**-6, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", [(3, 5, 2 * 777), (64, 2 * 4096)])
def test_the_gpu_kernels_are_the_formula(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    d_out = torch.randn(*shape[:-1], shape[-1] // 2, device="cuda").to(dtype)
    ours, theirs = swiglu(x), reference(exact)
    ours.backward(d_out)
    theirs.backward(d_out.double())
    assert ours.dtype == x.grad.dtype == dtype
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance / 10)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=tolerance, atol=tolerance / 10)
