"""Faults that a rank makes on purpose, so that it can be seen that the harness notices them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.kernels import expert_feed_forward as kernels
from fivefold.kernels.cross_entropy import linear_cross_entropy
from fivefold.kernels.linear import WeightGradient
from fivefold.kernels.partial_attention import Gradients
from fivefold.model.ledger import Ledger
from fivefold.model.mtp import inputs_ahead
from fivefold.model.transformer import Transformer
from fivefold.parallel import expert
from fivefold.parallel.accumulation import Accumulation
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.state import local_part
from fivefold.parallel.tied import _Owner as TiedOwner
from fivefold.pipeline.execute import Pipeline

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


@contextmanager
def one_weight_gradient_dropped() -> Iterator[None]:
    """Of the first microbatch's weight gradients that waited, the first is forgotten."""
    right, calls = Accumulation.compute, []

    def dropping(accumulation: Accumulation, gradients: Sequence[WeightGradient]) -> None:
        calls.append(accumulation)
        right(accumulation, gradients[1:] if len(calls) == 1 else gradients)

    with patch.object(Accumulation, "compute", dropping):
        yield


@contextmanager
def copy_of_the_embedding_not_added() -> Iterator[None]:
    """The first stage keeps the gradient that it found itself for an embedding of which the last has a copy."""
    right = TiedOwner.add_gradients

    def own_alone(owner: TiedOwner) -> None:
        own = local_part(owner.weight.grad).clone()
        right(owner)
        local_part(owner.weight.grad).copy_(own)

    with patch.object(TiedOwner, "add_gradients", own_alone):
        yield


@contextmanager
def copy_of_the_embedding_never_renewed() -> Iterator[None]:
    """The last stage goes on with the embedding that it began with."""
    right, calls = Pipeline.renew_copies, []

    def once(pipeline: Pipeline) -> None:
        calls.append(pipeline)
        if len(calls) == 1:
            right(pipeline)

    with patch.object(Pipeline, "renew_copies", once):
        yield


@contextmanager
def expert_gradients_doubled() -> Iterator[None]:
    """The gradients of experts come out as if each replica's were added twice."""
    right = kernels.grouped_weight_gradient
    with patch.object(kernels, "grouped_weight_gradient", lambda *inputs: 2 * right(*inputs)):
        yield


@contextmanager
def counts_not_summed() -> Iterator[None]:
    """Each rank moves its routers' biases by the tokens that it saw itself."""
    right = Ledger.totals
    with patch.object(Ledger, "totals", lambda ledger, _: right(ledger, ledger.vector())):
        yield


@contextmanager
def gates_lose_their_gradient() -> Iterator[None]:
    """What a gate's gradient is worth does not come back to the rank of the router."""
    right = expert._Passage.depart_back

    def lost(passage: Any, d_x: Tensor, d_gates: Tensor) -> None:
        right(passage, d_x, torch.zeros_like(d_gates))

    with patch.object(expert._Passage, "depart_back", lost):
        yield


@contextmanager
def further_labels_of_own_share() -> Iterator[None]:
    """Each rank of dp divides a depth's losses by the labels that it has itself."""
    right = Ledger.__init__

    def own_share(ledger: Ledger, *arguments: Any) -> None:
        right(ledger, *arguments)
        ledger.mtp_divisors = [each // dist.get_world_size() for each in ledger.mtp_divisors]

    with patch.object(Ledger, "__init__", own_share):
        yield


@contextmanager
def looking_ahead_in_own_slice() -> Iterator[None]:
    """The token after a position is taken to be the one that the rank of cp holds after it."""

    def shifted(tokens: Tensor, labels: Tensor, documents: Tensor | None, places: Tensor, depth: int) -> Any:
        own = None if documents is None else documents[:, places]
        return inputs_ahead(tokens[:, places], labels[:, places], own, torch.arange(len(places)), depth)

    with patch("fivefold.model.transformer.inputs_ahead", shifted):
        yield


@contextmanager
def head_without_factor() -> Iterator[None]:
    """The head's weight takes the gradient of each depth as if it were the next token's."""

    def unscaled(*inputs: Any, factor: float, **more: Any) -> Tensor:
        return linear_cross_entropy(*inputs, **more)

    with patch("fivefold.model.transformer.linear_cross_entropy", unscaled):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "": nullcontext,
    "gradients-not-reduced": gradients_not_reduced,
    "partial-gradients-not-summed": partial_gradients_not_summed,
    "loss-times-dp": loss_times_dp,
    "norm-not-summed-over-tp": norm_not_summed_over_tp,
    "gradient-of-travelling-keys-lost": gradient_of_travelling_keys_lost,
    "one-weight-gradient-dropped": one_weight_gradient_dropped,
    "copy-of-the-embedding-not-added": copy_of_the_embedding_not_added,
    "copy-of-the-embedding-never-renewed": copy_of_the_embedding_never_renewed,
    "further-labels-of-own-share": further_labels_of_own_share,
    "looking-ahead-in-own-slice": looking_ahead_in_own_slice,
    "head-without-factor": head_without_factor,
    "expert-gradients-doubled": expert_gradients_doubled,
    "counts-not-summed": counts_not_summed,
    "gates-lose-their-gradient": gates_lose_their_gradient,
}
