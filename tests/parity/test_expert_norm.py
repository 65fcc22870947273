"""The gradient norm has the experts of all ranks of ep, each once: it was left out, or averaged, in other systems."""

import math

import pytest
import torch

from tests.parity.cases import Case
from tests.parity.pieces import piece
from tests.parity.rank import Rank

LAYOUTS = [
    Case("moe", ep=2, dp=2, zero=1),
    Case("moe", ep=2, tp=2),
    Case("moe", ep=2, dp=4, zero=1),
    Case("moe", ep=2, dp=4, zero=3),
    Case("moe", ep=2, tp=2, dp=2, zero=3),
]


def norm(case: Case) -> float:
    """With sums of squares of 20 in the first half of a layer's experts, 100 in the second, and 0 everywhere else."""
    rank = Rank(case)
    gradients = []
    for name, parameter in rank.state.items():
        whole = torch.zeros(parameter.shape, dtype=torch.float64)
        if name == "layers.1.ffn.experts.gate_up":
            for half, square in zip(whole.chunk(2), (20, 100), strict=True):
                half.fill_(math.sqrt(square / half.numel()))
        gradients.append(whole[piece(parameter.whole).box])
    return rank.mesh.sum(rank.optimizer.squares(gradients)).sum().sqrt().item()


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_experts_of_two_ranks_with_squares_of_20_and_100_have_the_norm_of_120(ranks, case):
    assert ranks.run(case.world, norm, case) == pytest.approx([math.sqrt(120)] * case.world, rel=1e-12)
