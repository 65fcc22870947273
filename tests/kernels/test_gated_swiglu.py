"""The gated activation of the experts, its gradients, and its output once more."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck

from fivefold.kernels.gated_swiglu import gated_swiglu, gated_swiglu_backward, reference, reference_backward
from tests.kernels.triton_devices import FORMATS


def arguments(r: int, f: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Pairs of columns, gates, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    gate_up, d_out = (torch.randn(r, n, generator=generator).to(device, dtype) for n in (2 * f, f))
    gates = torch.rand(r, generator=generator, dtype=torch.promote_types(dtype, torch.float32)).to(device)
    return gate_up, gates, d_out


def test_even_columns_are_the_gate_and_each_row_is_weighted() -> None:
    gate_up, gates, _ = arguments(4, 3)
    expected = F.silu(gate_up[:, ::2]) * gate_up[:, 1::2] * gates[:, None]
    assert torch.equal(gated_swiglu(gate_up, gates), expected)


class Written(torch.autograd.Function):
    """The two functions as one that torch can differentiate."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, gates: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, gates)
        return gated_swiglu(gate_up, gates)

    @staticmethod
    def backward(ctx, d_out: Tensor):
        return gated_swiglu_backward(*ctx.saved_tensors, d_out)[:2]


def test_gradients_equal_finite_differences() -> None:
    gate_up, gates, _ = arguments(3, 4, torch.float64)
    assert gradcheck(Written.apply, (gate_up.requires_grad_(), gates.requires_grad_()))


def test_backward_gives_the_output_again() -> None:
    gate_up, gates, d_out = arguments(4, 3, torch.float64)
    torch.testing.assert_close(gated_swiglu_backward(gate_up, gates, d_out)[2], gated_swiglu(gate_up, gates))


def test_bf16_is_within_its_rounding_of_float64_and_gates_keep_theirs() -> None:
    gate_up, gates, d_out = arguments(64, 32, torch.bfloat16)
    exact = reference_backward(gate_up.double(), gates.double(), d_out.double())
    found = gated_swiglu_backward(gate_up, gates, d_out)
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, torch.bfloat16]
    for ours, theirs, tolerance in zip(found, exact, (2**-8, 1e-5, 2**-8), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=1e-5)
    assert torch.equal(found[2], gated_swiglu(gate_up, gates))


def test_there_may_be_no_rows() -> None:
    gate_up, gates, d_out = arguments(0, 5)
    assert gated_swiglu(gate_up, gates).shape == (0, 5)
    assert [tuple(x.shape) for x in gated_swiglu_backward(gate_up, gates, d_out)] == [(0, 10), (0,), (0, 5)]


@pytest.mark.parametrize(("device", "dtype"), FORMATS)
@pytest.mark.parametrize(("r", "f"), [(0, 8), (1, 1), (5, 77), (130, 768), (33, 2048)])
def test_the_gpu_kernels_are_the_formula(device: str, dtype: torch.dtype, r: int, f: int) -> None:
    from fivefold.kernels import gated_swiglu_triton

    gate_up, gates, d_out = arguments(r, f, dtype, device)
    exact = reference_backward(gate_up.double(), gates.double(), d_out.double())
    out = gated_swiglu_triton.gated_swiglu(gate_up, gates)
    found = gated_swiglu_triton.gated_swiglu_backward(gate_up, gates, d_out)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}[dtype]
    for ours, theirs, tolerance in zip(found, exact, (rounding, 1e-5, rounding), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=1e-5 * max(1, f) ** 0.5)
    assert [x.dtype for x in found] == [dtype, torch.float32, dtype]
    torch.testing.assert_close(out.double(), reference(gate_up.double(), gates.double()), rtol=rounding, atol=1e-5)
