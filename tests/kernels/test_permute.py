"""Rows that are spread and collected: a token's copies add up, and each move is the other's gradient."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from fivefold.kernels.permute import collect, gather_rows, reference, spread, sum_rows
from tests.kernels.triton_devices import DEVICES, FORMATS

# three tokens with two places each; the last token lost one of its places
INDEX = torch.tensor([1, 0, 1, 2, 0])
PLACES = torch.tensor([[1, 4], [0, 2], [-1, 3]], dtype=torch.int32)


def random(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), **options)


def test_a_row_lies_where_its_index_says() -> None:
    x = random(3, 4)
    assert torch.equal(spread(x, INDEX, PLACES), torch.stack([x[1], x[0], x[1], x[2], x[0]]))
    assert torch.equal(gather_rows(x[:, 0], INDEX.int()), x[:, 0][INDEX])


def test_a_tokens_rows_add_up_and_a_lost_place_adds_nothing() -> None:
    rows = random(5, 4)
    expected = torch.stack([rows[1] + rows[4], rows[0] + rows[2], rows[3]])
    assert torch.equal(collect(rows, INDEX, PLACES), expected)
    assert torch.equal(sum_rows(rows[:, 0], PLACES), expected[:, 0])


def test_a_lost_place_takes_nothing_from_a_row_that_is_not_finite() -> None:
    rows = random(5, 4)
    rows[0] = torch.nan
    assert not sum_rows(rows, PLACES)[2].isnan().any()


@pytest.mark.parametrize("width", [(4,), ()], ids=["rows", "numbers"])
def test_gradients_equal_finite_differences(width: tuple[int, ...]) -> None:
    x, rows = (random(n, *width, dtype=torch.float64, requires_grad=True) for n in (3, 5))
    assert gradcheck(lambda x: spread(x, INDEX, PLACES), (x,))
    assert gradcheck(lambda rows: collect(rows, INDEX, PLACES), (rows,))


def test_many_rows_are_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()
    assert sum_rows(rows, torch.tensor([[0, 1, 2]])).item() == 258.0  # in bf16 256 + 1 is 256


def test_rows_are_added_in_the_order_of_the_places() -> None:
    rows = torch.tensor([[1e30], [-1e30], [1.0]])
    assert sum_rows(rows, torch.tensor([[0, 1, 2], [0, 2, 1]])).flatten().tolist() == [1.0, 0.0]


def test_backward_keeps_places_alone() -> None:
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        collect(spread(random(3, 4, requires_grad=True), INDEX, PLACES), INDEX, PLACES)
    assert [t.dtype for t in kept] == [PLACES.dtype, INDEX.dtype]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_there_may_be_no_rows_and_no_tokens(device: str) -> None:
    nothing, nowhere = torch.zeros(0, 4, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    assert gather_rows(nothing, nowhere).shape == (0, 4)
    assert torch.equal(sum_rows(nothing, torch.full((3, 2), -1, device=device)), torch.zeros(3, 4, device=device))
    assert sum_rows(torch.ones(5, 4, device=device), nowhere.view(0, 2)).shape == (0, 4)


@pytest.mark.parametrize(("device", "dtype"), FORMATS)
@pytest.mark.parametrize("width", [(), (5,), (48,), (300,), (1536,), (4096,)])
def test_the_gpu_kernels_move_and_add_as_written(device: str, dtype: torch.dtype, width: tuple[int, ...]) -> None:
    from fivefold.kernels import permute_triton

    x = random(70, *width).to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    index = torch.randint(0, 70, (201,), generator=generator).to(device)
    places = torch.randint(-1, 70, (33, 3), generator=generator, dtype=torch.int32).to(device)
    assert torch.equal(permute_triton.gather_rows(x, index), x[index])
    assert torch.equal(permute_triton.sum_rows(x, places), reference(x, places))


@pytest.mark.parametrize("device", DEVICES)
def test_the_gpu_kernel_moves_numbers_of_any_format(device: str) -> None:
    from fivefold.kernels import permute_triton

    for dtype in (torch.int64, torch.int32, torch.float64):
        x = (100 * random(9, 3)).to(device, dtype)
        assert torch.equal(permute_triton.gather_rows(x, INDEX.to(device)), x[INDEX.to(device)])


@pytest.mark.gpu
def test_the_gpu_kernels_reach_rows_beyond_two_to_the_31_elements() -> None:
    rows = torch.zeros(2**20 + 2, 2048, device="cuda", dtype=torch.bfloat16)
    rows[-1] = 3.0
    last = torch.tensor([len(rows) - 1, 0], device="cuda")
    assert gather_rows(rows, last)[:, 0].tolist() == [3.0, 0.0]
    assert sum_rows(rows, last.view(1, 2))[0, 0].item() == 3.0
