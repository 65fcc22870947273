"""What a tensor that autograd saves for backward is kept as, when it is not simply kept.

`recompute` keeps a note of how to compute it again, `offload` a place in CPU memory; both are asked for the tensor when
backward needs it. Autograd has hooks for this, of which only the innermost pair is used, so the two share theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Replacement(Protocol):
    """Stands for a saved tensor."""

    def tensor(self) -> Tensor:
        """The tensor again, with the same values, size and strides."""


Pack = Callable[[Tensor], Tensor | Replacement]


def keep(tensor: Tensor) -> Tensor:
    """The saved tensor itself, without its graph: an operation that saves its own output would keep itself alive."""
    return tensor.detach()


def unpack(kept: Tensor | Replacement) -> Tensor:
    """The saved tensor, whatever it was kept as."""
    return kept if isinstance(kept, Tensor) else kept.tensor()


@dataclass(frozen=True)
class View:
    """How a tensor lies in its memory: format, sizes, and strides and offset in elements."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """That of `tensor`."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor that lies so in `storage`."""
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )
