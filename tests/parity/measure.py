"""What a layout costs on this rank: collectives it starts, and bytes that forward keeps for backward.

Collectives are counted by wrapping the functions of torch.distributed, which FSDP and our own code look up there at
each call. Those among one rank move nothing and are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

NAMES = {
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",  # the names in torch 2.13; the old ones call the functions behind them
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
    "batch_isend_irecv": "exchange",
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts, by kind, the collectives that this rank starts inside."""
    counts: Counter[str] = Counter()

    def wrapped(name: str) -> Callable[..., Any]:
        right = getattr(dist, name)

        def call(*arguments: Any, **named: Any) -> Any:
            group = named.get("group") or next((a for a in arguments if isinstance(a, dist.ProcessGroup)), None)
            if dist.get_world_size(group) > 1:
                counts[NAMES[name]] += 1
            return right(*arguments, **named)

        return call

    with ExitStack() as stack:
        for name in NAMES:
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, wrapped(name)))
        yield counts


def saved_bytes(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes of the distinct memory that `forward` keeps for backward, without the model's parameters.

    A tensor that is saved twice, or two views of one tensor, count once, and at the size of the memory that they keep.
    Run in a format without casts, so that no copy of a parameter is among them.
    """
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    parameters = {address(parameter) for parameter in model.parameters()}
    sizes = {address(tensor): tensor.untyped_storage().nbytes() for tensor in kept}
    loss.backward()
    return sum(size for place, size in sizes.items() if place not in parameters)


def address(tensor: Tensor) -> int:
    """Where a tensor's memory begins."""
    local = tensor.to_local() if isinstance(tensor, dist.tensor.DTensor) else tensor
    return local.untyped_storage().data_ptr()
