"""Activation offload moves a layer's memory away, once, and back in time; on a CPU to other CPU memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.config.run import Recompute
from fivefold.kernels.transfer import Lane
from fivefold.model.activations import activation_policies
from fivefold.model.offload import Offloader
from tests.model.stack import FF, B, D, E, G, H, S, Stack, assert_same_gradients

LAYERS = 5
PRODUCTS = 4
"""Of a layer; the first one's output is kept by all modes but `full`, the last one's by none."""
SENT = LAYERS - 1
"""Layers that one forward sends: each but the last; the last but one is still there as well."""
CPU = torch.device("cpu")


def host_bytes(stack: Stack) -> int:
    return stack.blocks[0].policy._storage.on(CPU).host.bytes


def still_there(stack: Stack) -> list[bool]:
    """For each layer of each forward, whether the memory of its first product is."""
    return [not reference.expired() for reference in stack.references[::PRODUCTS]]


def test_a_layers_memory_is_free_two_layers_later_and_the_last_two_when_another_forward_comes() -> None:
    stack = Stack(Recompute(mode="selective"), offload=True)
    losses = [stack.forward(0)]
    assert still_there(stack) == [False, False, False, True, True]
    losses.append(stack.forward(1))
    assert still_there(stack) == [False] * 8 + [True, True]
    assert [loss.item() > 0 for loss in losses] == [True, True]


def test_without_offload_it_is_there() -> None:
    stack = Stack(Recompute(mode="selective"), offload=False)
    loss = stack.forward()
    assert still_there(stack) == [True] * LAYERS
    assert loss.item() > 0


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_microbatches_whose_backward_comes_later_in_any_order(mode) -> None:
    expected = Stack(Recompute(), offload=False)
    for microbatch in range(3):
        expected.forward(microbatch).backward()
    for order in itertools.permutations(range(3)):
        stack = Stack(Recompute(mode=mode), offload=True)
        losses = [stack.forward(microbatch) for microbatch in range(3)]
        for microbatch in order:
            losses[microbatch].backward()
        assert_same_gradients(stack.gradients(), expected.gradients())


def test_forwards_between_backwards_as_in_a_pipeline() -> None:
    expected = Stack(Recompute(), offload=False)
    for microbatch in range(3):
        expected.forward(microbatch).backward()
    stack = Stack(Recompute(mode="selective"), offload=True)
    first, second = stack.forward(0), stack.forward(1)
    first.backward()
    third = stack.forward(2)
    second.backward()
    third.backward()
    assert_same_gradients(stack.gradients(), expected.gradients())


def test_memory_is_copied_once_however_often_it_is_saved() -> None:
    """The fused product is saved as a whole and as the values; the tables are the same for all layers."""
    stack = Stack(Recompute(mode="selective"), offload=True)
    loss = stack.forward(0)
    token = D + (H + 2 * G) * E + (H * E + H) + D + 2 * FF
    assert host_bytes(stack) == 8 * (SENT * B * S * token + 2 * S * E)
    assert loss.item() > 0


def test_full_recompute_sends_only_the_blocks_input() -> None:
    stack = Stack(Recompute(mode="full"), offload=True)
    loss = stack.forward(0)
    assert host_bytes(stack) == 8 * SENT * B * S * D
    assert loss.item() > 0


def test_cpu_memory_is_used_again_by_later_microbatches_and_steps() -> None:
    stack = Stack(Recompute(), offload=True)
    stack.forward().backward()
    used = host_bytes(stack)
    assert used > 0
    for microbatch in (0, 1, 2, 0):
        stack.forward(microbatch).backward()
        dropped = stack.forward(microbatch)
        del dropped
    assert host_bytes(stack) == used


def test_a_layer_is_fetched_while_the_one_after_it_computes_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers 0 to 2 are away when backward begins at layer 4; each comes back one layer ahead of its own backward."""
    stack = Stack(Recompute(mode="full"), offload=True)
    loss = stack.forward()
    fetched: list[int] = []
    copy = Lane.copy

    def counted(lane: Lane, pairs: list[tuple[Tensor, Tensor]], after: Any = ()) -> Any:
        fetched.extend([1] * len(pairs))
        return copy(lane, pairs, after)

    monkeypatch.setattr(Lane, "copy", counted)
    at_begin = {}
    for number, block in enumerate(stack.blocks):
        original = block.functions["rms_norm"]

        def begins(*args: Any, number: int = number, original: Any = original) -> Any:
            at_begin[number] = len(fetched)
            return original(*args)

        block.functions = block.functions | {"rms_norm": begins}
    loss.backward()
    assert at_begin == {4: 0, 3: 1, 2: 2, 1: 3, 0: 3}


def test_parameters_stay_also_when_a_product_saves_them_transposed() -> None:
    offloader = Offloader(CPU)
    weight = nn.Parameter(torch.rand(4, 4))
    parcel = offloader.begin_layer(first=True)
    assert isinstance(parcel.pack(weight), Tensor)
    assert isinstance(parcel.pack(weight.t()), Tensor)
    assert not isinstance(parcel.pack(weight * 2), Tensor)


def test_a_tensor_comes_back_with_its_size_strides_and_format() -> None:
    offloader = Offloader(CPU)
    whole = torch.arange(60, dtype=torch.int32).view(3, 4, 5)
    tensors = [whole, whole[1:, :, 2].t(), torch.zeros(0, 3), torch.tensor(1.5, dtype=torch.bfloat16)]
    parcel = offloader.begin_layer(first=True)
    kept = [parcel.pack(tensor) for tensor in tensors]
    later = [offloader.begin_layer(first=False) for _ in range(2)]
    assert len(later) == 2
    for tensor, ticket in zip(tensors, kept, strict=True):
        again = ticket if isinstance(ticket, Tensor) else ticket.tensor()
        assert again.dtype == tensor.dtype
        assert (again.shape, again.stride()) == (tensor.shape, tensor.stride())
        assert torch.equal(again, tensor)
        assert again.numel() == 0 or again.data_ptr() != tensor.data_ptr()


def test_what_backward_began_to_read_stays_when_a_forward_comes_before_it_ends() -> None:
    offloader = Offloader(CPU)
    parcel = offloader.begin_layer(first=True)
    read, unread = (parcel.pack(torch.full((3,), value)) for value in (1.0, 2.0))
    following = offloader.begin_layer(first=False)
    assert read.tensor().tolist() == [1.0] * 3
    offloader.begin_layer(first=True)
    assert unread.tensor().tolist() == [2.0] * 3
    assert following.items() == []


class Wide(nn.Module):
    """A block of a width that makes its copies take as long as its computation."""

    def __init__(self, policy: Any, width: int) -> None:
        super().__init__()
        self.policy = policy
        self.up = nn.Parameter(torch.randn(2 * width, width, device="cuda") / width**0.5)
        self.down = nn.Parameter(torch.randn(width, 2 * width, device="cuda") / width**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.policy.run(self._forward, x)

    def _forward(self, x: Tensor) -> Tensor:
        return x + self.policy.cheap(gate, x @ self.up.t()) @ self.down.t()


def gate(x: Tensor) -> Tensor:
    return torch.relu(x) * torch.sigmoid(x)


WIDTHS = {"none": 7, "selective": 3, "full": 1}
"""What `Wide` keeps in multiples of its input: that, and so many tensors of twice the width."""
INPUT_BYTES = 16384 * 2048 * 4


def on_a_gpu(mode: str, offload: bool, microbatches: int = 3) -> tuple[list[Tensor], int, int]:
    """Gradients, peak memory while they were computed, and pinned bytes: 8 layers, 16,384 tokens, width 2,048."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        Wide(p, 2048) for p in activation_policies(Recompute(mode=mode), range(8) if offload else (), range(8))
    )
    inputs = torch.randn(16384, 2048, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(microbatches):
        x = inputs
        for block in blocks:
            x = block(x)
        x.square().mean().backward()
        del x
    torch.cuda.synchronize()
    storage = blocks[0].policy._storage
    pinned = 0 if storage is None else storage.on(inputs.device).host.bytes
    return [p.grad.cpu() for p in blocks.parameters()], torch.cuda.max_memory_allocated(), pinned


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_on_a_gpu_gradients_stay_and_peak_memory_falls(mode) -> None:
    expected, plain, _ = on_a_gpu(mode, offload=False)
    found, less, pinned = on_a_gpu(mode, offload=True)
    for gradient, reference in zip(found, expected, strict=True):
        assert torch.equal(gradient, reference)
    assert plain - less > 3 * WIDTHS[mode] * INPUT_BYTES
    assert pinned == 7 * WIDTHS[mode] * INPUT_BYTES


@pytest.mark.gpu
def test_on_a_gpu_pinned_memory_is_allocated_once() -> None:
    _, _, once = on_a_gpu("none", offload=True, microbatches=1)
    _, _, often = on_a_gpu("none", offload=True, microbatches=4)
    assert once == often


@pytest.mark.gpu
def test_on_a_gpu_small_tensors_stay() -> None:
    parcel = Offloader(torch.device("cuda", 0)).begin_layer(first=True)
    assert isinstance(parcel.pack(torch.zeros(1000, device="cuda:0")), Tensor)
    assert isinstance(parcel.pack(torch.zeros(100_000)), Tensor)
    assert not isinstance(parcel.pack(torch.zeros(100_000, device="cuda:0")), Tensor)
