"""Rotary embedding: a turn by position x frequency, whose scores depend on distances alone."""

import torch
from torch import Tensor
from torch.autograd import gradcheck

from fivefold.kernels.rotary import rotate, rotation

FREQUENCIES = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    return rotate(x, x, *rotation(positions, FREQUENCIES.to(x.dtype)))[0]


def test_a_pair_is_turned_by_its_angle() -> None:
    x = torch.zeros(1, 1, 1, 6, dtype=torch.float64)
    x[..., 1] = 1.0  # channel 1 pairs with channel 4
    out = turned(x, torch.tensor([7]))
    expected = torch.tensor([0, 0.7, 0, 0, 0.7, 0], dtype=torch.float64)
    expected[1], expected[4] = expected[1].cos(), expected[4].sin()
    torch.testing.assert_close(out[0, 0, 0], expected)


def test_scores_depend_on_the_distance_of_query_and_key() -> None:
    q, k = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)
    scores = [turned(q, torch.tensor([i])).flatten() @ turned(k, torch.tensor([i - 5])).flatten() for i in (5, 900)]
    torch.testing.assert_close(scores[0], scores[1])


def test_rows_may_have_positions_of_their_own() -> None:
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2], [0, 0, 1]])
    together = turned(x, positions)
    for row in range(2):
        assert torch.equal(together[row], turned(x[row : row + 1], positions[row])[0])


def test_gradients_equal_finite_differences() -> None:
    q = torch.randn(1, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    k = torch.randn(1, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = rotation(torch.arange(3), FREQUENCIES, scale=1.2)
    assert gradcheck(lambda q, k: rotate(q, k, cos, sin), (q, k))


def test_bf16_is_right_at_far_positions() -> None:
    """With angles in bf16, position 8,001 would be turned as if it were 8,000."""
    x = torch.randn(1, 1, 4, 6).bfloat16()
    cos, sin = rotation(torch.tensor([8001]), FREQUENCIES.float())
    assert cos.dtype == torch.float32
    out, _ = rotate(x, x, cos, sin)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), turned(x.double(), torch.tensor([8001])), rtol=2**-8, atol=2e-3)
