"""How many ranks a token reaches, against all choices that it can make."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from fivefold.config.run import Experts
from fivefold.model.reach import goes_by_node, ranks_reached, tokens_arriving


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


def test_of_ranks_that_are_not_whole_the_last_has_the_rest() -> None:
    """Two thirds of the experts on one and a third on the other."""
    moe = Experts(experts=12, top_k=2, ffn=8)
    both_missed = 4 * 3 / (12 * 11) + 8 * 7 / (12 * 11)
    assert ranks_reached(moe, 1.5) == pytest.approx(2 - both_missed)


@pytest.mark.parametrize("hot", [1.0, 1.3, 1.5, 2.0])
def test_more_choices_of_a_rank_are_not_as_many_more_tokens(hot: float) -> None:
    """Against tokens that prefer the experts of the first of 8 ranks, each of 16."""
    moe, generator = Experts(experts=128, top_k=8, ffn=8), random.Random(0)

    def chosen(weight: float) -> tuple[float, float]:
        """Choices and tokens that come to the first rank, for each of its own tokens."""
        counts = []
        for _ in range(4000):  # Efraimidis and Spirakis: the largest of u^(1/w) are a draw by weight
            keys = [generator.random() ** (1 / (weight if expert < 16 else 1.0)) for expert in range(128)]
            best = sorted(range(128), key=keys.__getitem__)[-8:]
            counts.append(sum(expert < 16 for expert in best))
        return 8 * sum(counts) / len(counts), 8 * sum(count > 0 for count in counts) / len(counts)

    weights = {1.0: 1.0, 1.3: 1.37, 1.5: 1.65, 2.0: 2.46}
    choices, tokens = chosen(weights[hot])
    assert choices == pytest.approx(8 * hot, rel=0.03)
    assert tokens_arriving(moe, 8, hot) == pytest.approx(tokens, rel=0.03)
    assert tokens_arriving(moe, 8, 8.0) == 8


def test_tokens_go_by_node_where_that_spares_the_network_something() -> None:
    many, one = Experts(experts=128, top_k=8, ffn=8), Experts(experts=128, top_k=1, ffn=8)
    assert goes_by_node(many, 64, 8)
    assert not goes_by_node(one, 64, 8)
    assert not goes_by_node(many, 8, 8)
    assert not goes_by_node(many, 12, 8)
    assert not goes_by_node(many, 64, 1)
