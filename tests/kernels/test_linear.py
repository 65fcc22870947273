"""Products in the format in which the device is fast, rounded once."""

import pytest
import torch
from torch.autograd import gradcheck

from fivefold._torch import cpu_multiplies
from fivefold.kernels import linear as room
from fivefold.kernels.linear import linear, product_dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_is_computed_in_its_own_format(dtype: torch.dtype) -> None:
    assert product_dtype(torch.zeros(1, dtype=dtype)) == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_still_says_whether_a_cpu_has_half_precision_instructions(dtype: torch.dtype) -> None:
    assert cpu_multiplies(dtype) in (True, False)


def test_gradients_equal_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(size, dtype=torch.float64, generator=generator, requires_grad=True)
        for size in [(3, 5), (4, 5), (4,)]
    )
    assert gradcheck(linear, (x, weight, bias))


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_is_within_its_rounding_of_float64_on_cpus_with_and_without_instructions(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "cpu_multiplies", lambda dtype: fast)
    x, weight = torch.randn(64, 96).bfloat16(), torch.randn(32, 96).bfloat16()
    out = linear(x, weight)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=2**-8, atol=1e-4)
