"""Recompute and offload change what is kept and what is computed twice, never a gradient."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fivefold._torch import storage_reference
from fivefold.config.run import Recompute
from fivefold.kernels.layer_norm import layer_norm
from fivefold.model import offload as offload_module
from fivefold.model.activations import Policy, activation_policies
from fivefold.parallel.mesh import Mesh
from tests.memory import bytes_left
from tests.model.stack import CHEAP, DEAR, FF, FUNCTIONS, B, D, E, G, H, S, Stack, assert_same_gradients

MODES = ("none", "selective", "full")
MODES_AND_OFFLOAD = list(product(MODES, (False, True)))
KINDS = list(product(MODES, (1, 2), (False, True)))
LAYERS = 5
QKV = (H + 2 * G) * E
SELECTIVE = D + QKV + (H * E + H) + D + 2 * FF
"""Numbers that a token's layer keeps: its input, the products' outputs that a segment reads, attention's, with its
log-sum-exp. The last product's output is the next layer's input."""


@pytest.fixture(scope="module")
def expected() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and accumulated gradients of three microbatches, with plain autograd."""
    stack = Stack(Recompute(), offload=False)
    return accumulate(stack), stack.gradients()


def accumulate(stack: Stack) -> list[float]:
    losses = []
    for microbatch in range(3):
        loss = stack.forward(microbatch)
        loss.backward()
        losses.append(loss.item())
    return losses


def one_policy(mode: str, offload: bool = False) -> Policy:
    (policy,) = activation_policies(Recompute(mode=mode), range(1) if offload else (), range(1))
    return policy


@pytest.mark.parametrize(("mode", "every", "offload"), KINDS)
def test_loss_and_gradients_are_those_of_plain_autograd(mode, every, offload, expected) -> None:
    stack = Stack(Recompute(mode=mode, every=every), offload)
    assert accumulate(stack) == expected[0]
    assert_same_gradients(stack.gradients(), expected[1])


@pytest.mark.parametrize(("mode", "every", "offload"), KINDS)
def test_each_cheap_segment_is_computed_again_once_and_products_and_attention_only_by_full(mode, every, offload):
    stack = Stack(Recompute(mode=mode, every=every), offload)
    once = Counter(dict.fromkeys(CHEAP, 1) | DEAR)
    for microbatch in range(2):
        loss = stack.forward(microbatch)
        assert stack.calls == multiplied(once, LAYERS)
        stack.calls.clear()
        loss.backward()
        again = {"none": Counter(), "selective": Counter(CHEAP), "full": once}[mode]
        assert stack.calls == multiplied(again, len(range(0, LAYERS, every)))
        stack.calls.clear()


def multiplied(counts: Counter[str], factor: int) -> Counter[str]:
    return Counter({name: factor * count for name, count in counts.items()})


@pytest.mark.parametrize("every", [1, 2])
def test_selective_keeps_inputs_of_segments_and_attention_and_full_only_the_blocks_input(every) -> None:
    kept = {}
    for mode in MODES:
        stack = Stack(Recompute(mode=mode, every=every), offload=False)
        shared = 8 * (2 * S * E + E // 2)  # tables of the positions, of which each layer sees the same
        left, loss = bytes_left(stack.forward)
        kept[mode] = (left - shared) / (8 * B * S)
        del loss
    chosen = len(range(0, LAYERS, every))
    first = D  # the first block's input was there before, and what the last leaves is kept by the loss
    none = kept["none"] / LAYERS
    assert none > 1.5 * SELECTIVE
    assert kept["selective"] == pytest.approx(chosen * SELECTIVE + (LAYERS - chosen) * none, abs=1)
    assert kept["full"] == pytest.approx(chosen * first + (LAYERS - chosen) * none, abs=1)


@pytest.mark.parametrize(("mode", "offload"), MODES_AND_OFFLOAD)
def test_without_gradients_nothing_is_kept_and_the_result_is_the_same(mode, offload) -> None:
    stack = Stack(Recompute(mode=mode), offload)
    with_gradients = stack.forward().item()
    with torch.no_grad():
        left, loss = bytes_left(stack.forward)
    assert loss.item() == with_gradients
    assert left == 8


@pytest.mark.parametrize(("mode", "offload"), MODES_AND_OFFLOAD)
@pytest.mark.parametrize("backward", [True, False])
def test_nothing_lives_after_backward_or_when_the_graph_is_dropped(mode, offload, backward) -> None:
    stack = Stack(Recompute(mode=mode), offload)

    def use() -> None:
        loss = stack.forward()
        if backward:
            loss.backward()

    accumulate(stack)  # allocates the gradients, and what offload keeps for the next time
    stack.references.clear()
    gc.disable()  # no cycle may be needed to be found
    try:
        left, _ = bytes_left(use)
        assert all(reference.expired() for reference in stack.references)
        assert left == 0
    finally:
        gc.enable()


def test_layers_are_chosen_by_their_number_in_the_whole_model() -> None:
    policies = activation_policies(Recompute(mode="full", every=3), (), range(5, 9))
    assert [type(policy).__name__ for policy in policies] == ["Policy", "Full", "Policy", "Policy"]
    assert activation_policies(Recompute(mode="full"), (), range(4, 4)) == []


def test_a_parameter_that_a_segment_hides_is_refused() -> None:
    norm = nn.RMSNorm(4)
    policy = one_policy("selective")
    out = policy.run(lambda x: policy.cheap(norm, x) * 2, torch.ones(3, 4, requires_grad=True))
    with pytest.raises(RuntimeError, match=r"RMSNorm.* uses a parameter of shape \(4,\) that is not among its inputs"):
        out.sum().backward()


def both_ways(forward: Callable[[Policy, Tensor, Tensor], Tensor]) -> None:
    """Compare a forward of (x, weight) under `selective`, with and without offload, with plain autograd."""
    found = []
    for mode, offload in (("none", False), ("selective", False), ("selective", True)):
        generator = torch.Generator().manual_seed(1)
        x, weight = (torch.rand(4, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2))
        policy = one_policy(mode, offload)
        out = policy.run(lambda x, policy=policy, weight=weight: forward(policy, x, weight), x)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        found.append((out, x.grad, weight.grad))
    for other in found[1:]:
        for expected, value in zip(found[0], other, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-13, atol=0)


def test_a_chain_of_segments_runs_each_of_them_once_more() -> None:
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    def forward(policy: Policy, x: Tensor, weight: Tensor) -> Tensor:
        a = policy.cheap(counted("a", torch.sin), x)
        b = policy.cheap(counted("b", lambda a, w: (a * w, a.exp())), a, weight)
        c = policy.cheap(counted("c", torch.tanh), b[0])
        return c @ b[1] + a @ weight

    both_ways(forward)
    assert calls == Counter(a=5, b=5, c=5)


def test_a_second_run_is_dropped_by_its_own_segments_backward() -> None:
    policy = one_policy("selective")
    second_runs = []
    alive = []

    def wave(x: Tensor) -> Tensor:
        out = x.sin()
        if torch.is_grad_enabled():
            second_runs.append(storage_reference(out))
        return out

    def forward(x: Tensor) -> Tensor:
        x = x * 2
        x.register_hook(lambda gradient: alive.append(not second_runs[0].expired()))
        return policy.cheap(wave, x).exp().square()

    loss = policy.run(forward, torch.ones(3, 4, requires_grad=True)).sum()
    loss.backward()
    assert alive == [False]


def test_an_output_that_is_read_as_a_view_transposed_twice_or_as_the_result() -> None:
    def forward(policy: Policy, x: Tensor, weight: Tensor) -> Tensor:
        total, wave = policy.cheap(lambda x, w: (x + w, torch.sin(x * w)), x, weight)
        part = wave[1:, 2:].t() @ wave[1:].exp() * wave.t()[2:]
        return total + part.sum() + total.square()

    both_ways(forward)
    both_ways(lambda policy, x, weight: policy.cheap(torch.add, x @ weight, x))


def test_outputs_that_share_memory_with_an_input_or_each_other_and_indices() -> None:
    def halves(x: Tensor) -> tuple[Tensor, ...]:
        left, right = x.sin().split(2, dim=1)
        return (left.clone(), right.clone()) if torch.is_grad_enabled() else (left, right)

    def forward(policy: Policy, x: Tensor, weight: Tensor) -> Tensor:
        same, flipped = policy.cheap(lambda x: (x, x.t()), x)
        left, right = policy.cheap(halves, weight)
        values, order = policy.cheap(lambda x: x.sort(dim=1), x @ weight)
        return same @ flipped * (left * right).sum() + (weight.gather(1, order) * values.exp()).square()

    both_ways(forward)


def test_an_output_that_the_second_run_lays_out_otherwise() -> None:
    """A compiled function may choose other strides when it is compiled with a graph."""

    def other_strides(x: Tensor) -> Tensor:
        return x.sin() if torch.is_grad_enabled() else x.sin().t().contiguous().t()

    def forward(policy: Policy, x: Tensor, weight: Tensor) -> Tensor:
        wave = policy.cheap(other_strides, x)
        return wave @ weight + wave.t()[1] * wave[:, 2:3].exp()

    both_ways(forward)


def test_inputs_without_gradient_and_those_that_are_no_tensors() -> None:
    x = torch.rand(3, 4, dtype=torch.float64)
    weight = torch.rand(4, dtype=torch.float64, requires_grad=True)
    gradients = []
    for mode in ("none", "selective"):
        policy = one_policy(mode)
        normed = policy.run(lambda x, policy=policy: policy.cheap(layer_norm, x, weight, None, 1e-5).square(), x)
        gradients += torch.autograd.grad(normed.sum(), weight)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-13, atol=0)


def test_a_weight_gradient_that_is_put_off_gets_the_segments_output() -> None:
    queue: list[tuple[Tensor, Tensor]] = []

    class Deferred(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            x, weight = ctx.saved_tensors
            queue.append((x, gradient))
            return gradient @ weight.t(), None

    x, weight = (torch.rand(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad((x.sin() @ weight).exp().sum(), (x, weight))
    for offload in (False, True):
        policy = one_policy("selective", offload)
        out = policy.run(lambda x, policy=policy: Deferred.apply(policy.cheap(torch.sin, x), weight), x)
        (gradient,) = torch.autograd.grad(out.exp().sum(), x)
        (saved, incoming) = queue.pop()
        torch.testing.assert_close(gradient, expected[0], rtol=1e-13, atol=0)
        torch.testing.assert_close(saved.t() @ incoming, expected[1], rtol=1e-13, atol=0)


@pytest.mark.parametrize(("mode", "offload"), MODES_AND_OFFLOAD)
def test_weights_that_fsdp_frees_after_forward_get_their_gradients(mode, offload, expected, one_rank: Mesh) -> None:
    stack = Stack(Recompute(mode=mode), offload)
    for block in stack.blocks:
        fully_shard(block, mesh=one_rank.dense["shard"], reshard_after_forward=True)
    assert accumulate(stack) == expected[0]
    whole = {
        name: gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        for name, gradient in stack.gradients().items()
    }
    assert_same_gradients(whole, expected[1])


def test_compiled_functions_as_segments_and_as_their_readers(expected) -> None:
    """As on a GPU, but without code generation: graphs by torch.compile, which chooses what each saves."""
    plain = {name: getattr(function, "__wrapped__", function) for name, function in FUNCTIONS.items()}
    names = (*CHEAP, "attend")
    compiled = FUNCTIONS | {name: torch.compile(plain[name], backend="aot_eager") for name in names}
    for mode, offload in MODES_AND_OFFLOAD:
        stack = Stack(Recompute(mode=mode), offload, functions=compiled)
        assert accumulate(stack) == pytest.approx(expected[0], rel=1e-14)
        assert_same_gradients(stack.gradients(), expected[1], 1e-12)
    stack = Stack(Recompute(mode="selective"), offload=False, functions=compiled)
    left, _ = bytes_left(stack.forward)
    assert left / (8 * B * S) == pytest.approx(LAYERS * SELECTIVE, rel=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "offload"), MODES_AND_OFFLOAD)
def test_with_the_kernels_of_a_gpu(mode, offload, expected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_module, "LEAST_BYTES", {})
    stack = Stack(Recompute(mode=mode), offload)
    stack.blocks.to("cuda", torch.float32)
    stack.inputs = [x.detach().to("cuda", torch.float32).requires_grad_() for x in stack.inputs]
    assert accumulate(stack) == pytest.approx(expected[0], rel=1e-4)
    assert_same_gradients({name: g.cpu().double() for name, g in stack.gradients().items()}, expected[1], 1e-3)
