"""The gated activation on alternate columns."""

import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from fivefold.kernels.swiglu import swiglu


def test_even_columns_are_the_gate_and_odd_ones_the_up_projection() -> None:
    gate, up = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    alternate = torch.stack([gate, up], dim=-1).flatten(-2)
    assert torch.equal(swiglu(alternate), F.silu(gate) * up)


def test_gradients_equal_finite_differences() -> None:
    assert gradcheck(swiglu, torch.randn(3, 8, dtype=torch.float64, requires_grad=True))


def test_bf16_is_within_its_rounding_of_float64() -> None:
    x = torch.randn(64, 32).bfloat16()
    torch.testing.assert_close(swiglu(x).double(), swiglu(x.double()), rtol=2**-6, atol=1e-4)
