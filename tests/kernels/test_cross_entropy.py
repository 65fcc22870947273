"""The loss without the logits against plain projection and cross-entropy."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.cross_entropy import IGNORE, linear_cross_entropy


def example(tokens: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 16, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, 16, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[tokens // 3] = IGNORE
    return hidden, weight, labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")


@pytest.mark.parametrize("vocab", [128, 300, 1003])
@pytest.mark.parametrize("chunk", [1, 7, 20, 64])
def test_loss_and_gradients_are_the_plain_ones_for_any_chunk_and_vocabulary(vocab: int, chunk: int) -> None:
    hidden, weight, labels = example(20, vocab)
    loss, reference = linear_cross_entropy(hidden, weight, labels, chunk), plain(hidden, weight, labels)
    torch.testing.assert_close(loss, reference, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(value / 19, (hidden, weight)) for value in (loss, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_gradients_equal_finite_differences() -> None:
    hidden, weight, labels = example(6, 130)
    linear_cross_entropy(hidden, weight, labels, 4).backward()
    for tensor in (hidden, weight):
        for place in torch.randint(tensor.numel(), (12,), generator=torch.Generator().manual_seed(0)).tolist():
            moved = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    tensor.view(-1)[place] += step
                    moved.append(linear_cross_entropy(hidden, weight, labels, 4))
                    tensor.view(-1)[place] -= step
            assert (moved[0] - moved[1]).item() / 2e-5 == pytest.approx(tensor.grad.view(-1)[place].item(), abs=1e-8)


def test_a_second_backward_is_an_error_and_not_a_missing_gradient() -> None:
    hidden, weight, labels = example(6, 130)
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        loss.backward()


def test_evaluation_gives_the_same_loss_and_needs_no_gradient() -> None:
    hidden, weight, labels = example(20, 300)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, 7)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, linear_cross_entropy(hidden, weight, labels, 7), rtol=1e-14, atol=0)


def test_rows_without_a_label_give_nothing_and_get_nothing() -> None:
    hidden, weight, labels = example(20, 300)
    labels[:10] = IGNORE  # a whole chunk of 7 and a part of the next
    loss = linear_cross_entropy(hidden, weight, labels, 7)
    torch.testing.assert_close(loss, plain(hidden[10:], weight, labels[10:]), rtol=1e-12, atol=0)
    d_hidden, d_weight = torch.autograd.grad(loss, (hidden, weight))
    assert not d_hidden[:10].any()
    (expected,) = torch.autograd.grad(plain(hidden[10:], weight, labels[10:]), weight)
    torch.testing.assert_close(d_weight, expected, rtol=1e-11, atol=1e-13)


def test_no_label_at_all_is_a_loss_of_zero() -> None:
    hidden, weight, labels = example(5, 300)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE))
    assert loss == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_one_gradient_alone_can_be_asked_for(wanted: str) -> None:
    hidden, weight, labels = example(20, 300)
    (weight if wanted == "hidden" else hidden).requires_grad_(False)
    leaf = hidden if wanted == "hidden" else weight
    (ours,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, 7), leaf)
    (theirs,) = torch.autograd.grad(plain(hidden, weight, labels), leaf)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_bf16_is_close_to_float64_and_its_sums_are_wide() -> None:
    """Over 40 chunks a weight gradient summed in bf16 would be off by its rounding 40 times."""
    hidden, weight, labels = example(640, 300, torch.bfloat16)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    loss, reference = linear_cross_entropy(hidden, weight, labels, 16), plain(*wide, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), reference, rtol=2e-3, atol=0)
    ours, theirs = torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(reference, wide)
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.bfloat16
        assert (our.double() - their).norm() / their.norm() < 5e-3


def test_a_confident_bf16_model_still_learns_from_its_label() -> None:
    """softmax - 1 must be rounded after the subtraction: 0.999 alone is 1 in bf16."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(128, 1, dtype=torch.bfloat16)
    weight[3] = 11.75
    weight.requires_grad_()
    (d_weight,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, torch.tensor([3])), weight)
    expected = torch.softmax(weight.detach().double()[:, 0], 0)[3] - 1
    assert expected < 0
    torch.testing.assert_close(d_weight[3, 0].double(), expected, rtol=2**-8, atol=0)
