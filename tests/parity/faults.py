"""Faults that a rank makes on purpose, so that it can be seen that the harness notices them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.kernels.partial_attention import Gradients
from fivefold.model.transformer import Transformer
from fivefold.parallel.mesh import Mesh

REDUCE_SCATTER = [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)]
"""torch renamed it in 2.13."""


@contextmanager
def gradients_not_reduced() -> Iterator[None]:
    """Each rank of dp keeps its own part of its own gradient."""

    def own_part(output: Tensor, input: Tensor, *_: Any, group: dist.ProcessGroup, **__: Any) -> None:
        output.copy_(input.chunk(group.size())[group.rank()])

    with ExitStack() as stack:
        for name in REDUCE_SCATTER:
            stack.enter_context(patch.object(dist, name, own_part))
        yield


@contextmanager
def partial_gradients_not_summed() -> Iterator[None]:
    """The ranks of tp keep what each found for norms and row biases on its own tokens."""
    with patch("fivefold.train.step.sum_partial", lambda *_: None):
        yield


@contextmanager
def loss_times_dp() -> Iterator[None]:
    """The loss is scaled by the number of ranks; the clip hides it from the weights, and Adam would too."""
    right = Transformer.forward
    with patch.object(Transformer, "forward", lambda *inputs: right(*inputs) * dist.get_world_size()):
        yield


@contextmanager
def norm_not_summed_over_tp() -> Iterator[None]:
    """Each rank of tp, which are all ranks, clips by the norm of its own pieces."""
    right = Mesh.sum

    def loss_alone(mesh: Mesh, values: Tensor) -> Tensor:
        own = values[1:].clone()
        right(mesh, values)
        values[1:] = own
        return values

    with patch.object(Mesh, "sum", loss_alone):
        yield


@contextmanager
def gradient_of_travelling_keys_lost() -> Iterator[None]:
    """What a rank of cp finds for the keys and values that came in the ring's first hop does not reach their owner."""

    class Losing(Gradients):
        hops = 0

        def of(self, piece: Any, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            self.hops += 1
            dk, dv = super().of(piece, k, v)
            return (torch.zeros_like(dk), torch.zeros_like(dv)) if self.hops == 2 else (dk, dv)

    with patch("fivefold.parallel.context_ring.Gradients", Losing):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "": nullcontext,
    "gradients-not-reduced": gradients_not_reduced,
    "partial-gradients-not-summed": partial_gradients_not_summed,
    "loss-times-dp": loss_times_dp,
    "norm-not-summed-over-tp": norm_not_summed_over_tp,
    "gradient-of-travelling-keys-lost": gradient_of_travelling_keys_lost,
}
