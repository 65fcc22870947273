"""What each layer keeps for backward: everything, what is dear to compute again, or its input; here or in CPU memory.

A block has its policy run its forward, and marks the cheap segments in it; it is written once for all of them. A policy
belongs to one layer of this rank's stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fivefold.config.run import Recompute
from fivefold.model.offload import Offloader
from fivefold.model.recompute import Scope
from fivefold.model.saved import Pack, keep, unpack

R = TypeVar("R")


def activation_policies(recompute: Recompute, offload: Collection[int], layers: Sequence[int]) -> list[Policy]:
    """One for each layer of a stage, in the order in which they run; `layers` are their numbers in the whole model.

    What the layers in `offload` keep waits in CPU memory, except in the last two of them before backward begins.
    """
    kinds = {"none": Policy, "selective": Selective, "full": Full}
    storage = Storage()
    first = min(offload, default=None)
    return [
        kinds[recompute.mode if number % recompute.every == 0 else "none"](
            storage if number in offload else None, first=number == first
        )
        for number in layers
    ]


class Storage:
    """The offloaders of a stage, one a device: where a model is built is not where it runs."""

    def __init__(self) -> None:
        self._offloaders: dict[torch.device, Offloader] = {}

    def on(self, device: torch.device) -> Offloader:
        """That of `device`."""
        if device not in self._offloaders:
            self._offloaders[device] = Offloader(device)
        return self._offloaders[device]


class Policy:
    """Keeps all that autograd saves: mode `none`."""

    def __init__(self, storage: Storage | None, first: bool) -> None:
        """`storage` is where what is kept waits, None for on the device; `first` says if the
        layer is the first of its stage that has it."""
        self._storage = storage
        self._first = first

    def run(self, forward: Callable[..., R], *args: Any) -> R:
        """forward(*args), a block's: the residual stream, which has the gradient, and what all blocks share."""
        if self._storage is None or not torch.is_grad_enabled():
            return forward(*args)
        with saved_tensors_hooks(self._keeper(args[0]), unpack):
            return forward(*args)

    def cheap(self, function: Callable[..., R], *inputs: Any) -> R:
        """function(*inputs): a tensor or a tuple of tensors, that costs little to compute again.

        Parameters that it uses must be among the inputs, and it must not change its inputs.
        """
        return function(*inputs)

    def _keeper(self, x: Tensor) -> Pack:
        """What takes the tensors that this forward keeps."""
        if self._storage is None:
            return keep
        return self._storage.on(x.device).begin_layer(self._first).pack


KEEP = Policy(None, first=True)
"""For what stands outside of the layers."""


class Full(Policy):
    """Keeps the block's input and computes the block again in backward."""

    def run(self, forward: Callable[..., R], *args: Any) -> R:
        """As `Policy.run`."""
        if not torch.is_grad_enabled():
            return forward(*args)
        return super().run(partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False), *args)


class Selective(Policy):
    """Keeps what stands outside of cheap segments, and their inputs; computes their outputs again."""

    def __init__(self, storage: Storage | None, first: bool) -> None:
        super().__init__(storage, first)
        self._scope: Scope | None = None
        self._checked = False

    def run(self, forward: Callable[..., R], *args: Any) -> R:
        """As `Policy.run`."""
        if not torch.is_grad_enabled():
            return forward(*args)
        with self._open_scope(self._keeper(args[0])) as scope, saved_tensors_hooks(scope.pack, unpack):
            return forward(*args)

    def cheap(self, function: Callable[..., R], *inputs: Any) -> R:
        """As `Policy.cheap`."""
        if self._scope is None or not torch.is_grad_enabled():
            return function(*inputs)
        return self._scope.run(function, *inputs)

    @contextlib.contextmanager
    def _open_scope(self, keep: Pack) -> Iterator[Scope]:
        self._scope = Scope(keep, self._checked)
        try:
            yield self._scope
            self._checked = True
        finally:
            self._scope.close()
            self._scope = None
