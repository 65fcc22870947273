"""How many ranks a token reaches, against all choices that it can make."""

from __future__ import annotations

from itertools import combinations

import pytest

from fivefold.config.run import Experts
from fivefold.model.reach import ranks_reached


def counted(moe: Experts, ranks: int) -> float:
    """The mean over all choices of groups, and of experts in them."""
    per_group, per_rank = moe.experts // moe.groups, moe.experts // ranks
    reached = [
        len({expert // per_rank for expert in experts})
        for groups in combinations(range(moe.groups), moe.top_groups)
        for experts in combinations([e for e in range(moe.experts) if e // per_group in groups], moe.top_k)
    ]
    return sum(reached) / len(reached)


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 12])
@pytest.mark.parametrize(
    ("top_k", "groups", "top_groups"), [(1, 1, 1), (3, 1, 1), (8, 1, 1), (3, 4, 2), (2, 6, 3), (5, 3, 2)]
)
def test_a_token_reaches_as_many_ranks_as_the_mean_over_all_its_choices(
    top_k: int, groups: int, top_groups: int, ranks: int
) -> None:
    moe = Experts(experts=12, top_k=top_k, ffn=8, groups=groups, top_groups=top_groups)
    assert ranks_reached(moe, ranks) == pytest.approx(counted(moe, ranks), rel=1e-12)
