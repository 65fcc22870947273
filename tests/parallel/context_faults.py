"""Faults that a comparison with one process must see: each stays in force inside its `with`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch.distributed as dist
from torch import Tensor

from fivefold.kernels import partial_attention
from fivefold.kernels.partial_attention import Gradients, Piece
from fivefold.parallel import context
from tests.parallel.context_case import Case, Tensors, on_a_rank


@contextmanager
def merges_drop_the_log_sum_exp() -> Iterator[None]:
    """Outputs over other keys count the same, whatever their scores."""

    def average(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
        out.copy_((out + more) / 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_attention, "merge_", average)
        yield


@contextmanager
def one_hop_loses_its_gradients() -> Iterator[None]:
    """What rank 0 finds for the keys of its second hop never leaves it."""
    of = Gradients.of
    hops = []

    def lossy(self: Gradients, piece: Piece, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        dk, dv = of(self, piece, k, v)
        hops.append(piece)
        lost = len(hops) == 2 and dist.get_rank() == 0
        return (dk * 0, dv * 0) if lost else (dk, dv)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gradients, "of", lossy)
        yield


@contextmanager
def slopes_are_those_of_rank_0() -> Iterator[None]:
    """Every rank's heads get the slopes of the first heads."""
    plan = context.attention_mask

    with pytest.MonkeyPatch.context() as patch:
        steep = Case("ulysses", alibi=True).slopes
        assert steep is not None
        patch.setattr(context, "attention_mask", lambda like, rows, slopes: plan(like, rows, steep[: len(slopes)]))
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    fault.__name__: fault
    for fault in (merges_drop_the_log_sum_exp, one_hop_loses_its_gradients, slopes_are_those_of_rank_0)
}


def faulty(case: Case, fault: str) -> tuple[Tensor, Tensors]:
    """`on_a_rank` under a fault."""
    with FAULTS[fault]():
        return on_a_rank(case)
