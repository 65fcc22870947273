"""Grouped products equal the products of each expert alone, whoever has how many rows."""

import pytest
import torch
from torch import Tensor

from fivefold.kernels import linear as room
from fivefold.kernels.grouped import (
    add_grouped_weight_gradient,
    grouped_multiply,
    grouped_multiply_transposed,
    grouped_weight_gradient,
)
from tests.kernels.triton_devices import DEVICES

COUNTS = {
    "uneven": [2, 0, 5, 1],
    "the first and last without rows": [0, 3, 4, 0],
    "all to one": [0, 0, 9, 0],
    "no rows": [0, 0, 0, 0],
}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def factors(counts: list[int], dtype: torch.dtype, device: str = "cpu", scale: int = 1) -> tuple[Tensor, ...]:
    """x (r, i), weight (e, o, i), g (r, o) and ends (e,)."""
    generator = torch.Generator().manual_seed(0)
    r, i, o = scale * sum(counts), 16 * scale, 24 * scale
    shapes = [(r, i), (len(counts), o, i), (r, o)]
    x, weight, g = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes)
    return x, weight, g, scale * torch.tensor(counts).cumsum(0).to(device, torch.int32)


def by_expert(x: Tensor, weight: Tensor, g: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three products in fp64, expert by expert."""
    x, weight, g = x.double(), weight.double(), g.double()
    starts = [0, *ends.tolist()[:-1]]
    rows = [slice(a, b) for a, b in zip(starts, ends.tolist(), strict=True)]
    y = torch.cat([x[part] @ w.T for part, w in zip(rows, weight, strict=True)])
    d_x = torch.cat([g[part] @ w for part, w in zip(rows, weight, strict=True)])
    return y, d_x, torch.stack([g[part].T @ x[part] for part in rows])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float64, 1e-14),
        ("cpu", torch.float32, 1e-5),
        ("cpu", torch.bfloat16, 2**-7),
        pytest.param("cuda", torch.float64, 1e-14, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 2**-7, marks=pytest.mark.gpu),
    ],
)
def test_products_are_those_of_each_expert_alone(
    counts: list[int], device: str, dtype: torch.dtype, tolerance: float
) -> None:
    x, weight, g, ends = factors(counts, dtype, device)
    found = (
        grouped_multiply(x, weight, ends),
        grouped_multiply_transposed(g, weight, ends),
        grouped_weight_gradient(g, x, ends),
    )
    for ours, exact in zip(found, by_expert(x, weight, g, ends), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("device", "dtype", "scale", "tolerance"),
    [
        ("cpu", torch.float64, 1, 1e-14),
        pytest.param("cuda", torch.float64, 1, 1e-14, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 16, 2**-7, marks=pytest.mark.gpu),
    ],
)
def test_rows_behind_the_last_expert_reach_no_other_row_and_no_weight(
    device: str, dtype: torch.dtype, scale: int, tolerance: float
) -> None:
    """There lie choices that were dropped."""
    x, weight, g, ends = factors([2, 0, 5, 1, 3], dtype, device, scale)
    weight, ends, last = weight[:-1], ends[:-1], 8 * scale
    exact = by_expert(x[:last], weight, g[:last], ends)
    x[last:], g[last:] = torch.nan, torch.nan
    found = (
        grouped_multiply(x, weight, ends)[:last],
        grouped_multiply_transposed(g, weight, ends)[:last],
        grouped_weight_gradient(g, x, ends),
        add_grouped_weight_gradient(None, g, x, ends, torch.promote_types(dtype, torch.float32)),
    )
    for ours, theirs in zip(found, (*exact, exact[-1]), strict=True):
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error <= tolerance


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_is_within_its_rounding_on_cpus_with_and_without_instructions(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "cpu_multiplies", lambda dtype: fast)
    x, weight, g, ends = factors([2, 0, 5, 1], torch.bfloat16)
    exact = by_expert(x, weight, g, ends)
    torch.testing.assert_close(grouped_multiply(x, weight, ends).double(), exact[0], rtol=2**-8, atol=1e-4)
    torch.testing.assert_close(grouped_weight_gradient(g, x, ends).double(), exact[2], rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_weight_gradients_are_added_up_in_place_in_a_format_of_their_own(
    device: str, dtype: torch.dtype, wide: torch.dtype
) -> None:
    x, weight, g, ends = factors([2, 0, 5, 1], dtype, device)
    total = add_grouped_weight_gradient(None, g, x, ends, wide)
    once = total.clone()
    assert total.dtype == wide
    assert not total[1].any()
    again = add_grouped_weight_gradient(total, g, x, ends, wide)
    assert again is total
    torch.testing.assert_close(total, 2 * once)
    exact = by_expert(x, weight, g, ends)[2]
    torch.testing.assert_close(once.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_an_expert_without_rows_has_a_zero_gradient_whatever_was_in_its_memory(counts: list[int]) -> None:
    """torch's grouped product did not write it."""
    x, _, g, ends = factors(counts, torch.bfloat16, "cuda", scale=64)
    for _ in range(3):
        left = torch.full((len(counts), g.shape[1], x.shape[1]), torch.nan, device="cuda", dtype=torch.bfloat16)
        del left
        gradient = grouped_weight_gradient(g, x, ends)
        assert [bool(part.any()) for part in gradient] == [count > 0 for count in counts]
        assert gradient.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [(3, 5), (70, 80), (400, 401)])
def test_the_gpu_kernel_zeroes_what_has_no_rows_and_nothing_else(device: str, size: tuple[int, int]) -> None:
    from fivefold.kernels.grouped_triton import zero_empty_

    for ends, empty in (([0, 3, 3, 5, 5], [0, 2, 4]), ([2, 2, 2, 4, 7], [1, 2])):
        gradient = torch.full((5, *size), torch.nan, device=device)
        zero_empty_(gradient, torch.tensor(ends, dtype=torch.int32, device=device))
        assert [bool((part == 0).all()) for part in gradient] == [expert in empty for expert in range(5)]
        assert [bool(part.isnan().all()) for part in gradient] == [expert not in empty for expert in range(5)]


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device() -> None:
    x, weight, g, ends = factors([2, 0, 5, 1], torch.bfloat16, "cuda", scale=64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_multiply(x, weight, ends)
        grouped_multiply_transposed(g, weight, ends)
        total = add_grouped_weight_gradient(None, g, x, ends, torch.float32)
        add_grouped_weight_gradient(total, g, x, ends, torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_widths_that_torch_does_not_take_are_multiplied_all_the_same() -> None:
    x, weight, _, ends = (
        t[..., :13].contiguous() if t.ndim > 1 else t for t in factors([2, 0, 5, 1], torch.bfloat16, "cuda")
    )
    y = grouped_multiply(x, weight, ends)
    torch.testing.assert_close(y.double(), by_expert(x, weight, y, ends)[0], rtol=2**-8, atol=1e-4)
