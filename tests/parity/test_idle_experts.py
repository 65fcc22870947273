"""Experts that lose all their tokens after a step in which each had some, so that memory holds what they had before.

As in `test_experts.py` compared with one process; and the gradient of an expert without tokens is exactly zero.
"""

from typing import NamedTuple

import pytest
import torch

from fivefold.config.rules import check
from tests.parity.cases import Case
from tests.parity.pieces import TOLERANCE, Pieces, differing_copies, faults
from tests.parity.rank import Rank

IDLE = 4
"""The experts with the lowest numbers of eight, all on the same ranks."""
LAYOUTS = [
    Case("moe-bias", ep=2, dp=2, zero=3, recompute="full"),
    Case("moe-bias", ep=4, dp=4, zero=3, recompute="selective"),
    Case("moe-bias", ep=2, pp=2, schedule="zb-v", chunks=2, dp=2),
]


class Seen(NamedTuple):
    """What a rank saw."""

    counts: list[torch.Tensor]
    """Of each step, by layer and expert."""
    figures: list[float]
    """The second step's loss and gradient norm."""
    gradients: Pieces
    """The second step's."""
    parameters: Pieces
    """After it."""


def a_step_with_all_experts_and_one_with_half(case):
    """What this rank saw."""
    rank = Rank(case)
    biases = [buffer for name, buffer in rank.buffers.items() if name.endswith("router.bias")]
    first = rank.step(0)
    for bias in biases:
        bias[:IDLE] = -1e9
    second = rank.step(1)
    counts = [result.totals.counts for result in (first, second)]
    return Seen(counts, [second.loss.item(), second.norm.item()], rank.gradients, rank.parameters())


@pytest.fixture(scope="module")
def alone(ranks):
    """What one process sees."""
    (seen,) = ranks.run(1, a_step_with_all_experts_and_one_with_half, Case("moe-bias"))
    return seen


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_experts_that_become_idle_have_gradients_of_zero_and_all_else_is_that_of_one_process(ranks, alone, case):
    assert check(case.run, case.world) == []
    found = ranks.run(case.world, a_step_with_all_experts_and_one_with_half, case)
    for each in found:
        assert [counts.tolist() for counts in each.counts] == [counts.tolist() for counts in alone.counts]
        assert each.figures == pytest.approx(alone.figures, rel=TOLERANCE)
        for name, gradient in each.gradients.items():
            if ".experts." in name:
                assert not gradient.values[: max(0, IDLE - gradient.offsets[0])].any(), name
    for kind in ("gradients", "parameters"):
        pieces = [getattr(each, kind) for each in found]
        whole = {name: torch.from_numpy(each.values) for name, each in getattr(alone, kind).items()}
        assert list(faults(kind, whole, pieces, TOLERANCE)) == []
        assert list(differing_copies(pieces)) == []


def test_each_expert_had_tokens_before_and_half_of_them_none_after(alone):
    before, after = alone.counts
    assert before.all()
    assert not after[:, :IDLE].any()
    assert after[:, IDLE:].all()
