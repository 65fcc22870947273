"""How many ranks a token reaches whose experts are spread over them. Imports no torch."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import comb, prod

from fivefold.config.run import Experts


def ranks_reached(moe: Experts, ranks: float) -> float:
    """The mean number of `ranks`, which share out the experts evenly, that have experts of a token.

    Its groups and, in them, its experts are taken as drawn by lot: routing that prefers some reaches fewer ranks.
    """
    return _ranks_reached(moe.experts, moe.top_k, moe.groups, moe.top_groups, ranks)


@lru_cache(maxsize=4096)
def _ranks_reached(experts: int, top_k: int, groups: int, top_groups: int, ranks: float) -> float:
    size, of_group = experts / ranks, experts / groups
    shares = Counter(_shares(number * size, (number + 1) * size, of_group, groups) for number in range(int(ranks)))
    reached = 0.0
    for mine, times in shares.items():
        for (chosen, count), ways in _choices(mine).items():
            others = top_groups - chosen
            if 0 <= others <= groups - len(mine):
                likely = ways * comb(groups - len(mine), others) / comb(groups, top_groups)
                reached += times * likely * (1 - _all_missed(count, of_group * top_groups, top_k))
    return max(1.0, reached * ranks / int(ranks))


def _shares(first: float, last: float, of_group: float, groups: int) -> tuple[float, ...]:
    """How many experts from `first` to `last` are of each group, of those that have any."""
    shares = (min(last, (group + 1) * of_group) - max(first, group * of_group) for group in range(groups))
    return tuple(round(share, 6) for share in shares if share > 1e-6)


def _choices(mine: tuple[float, ...]) -> Counter[tuple[int, float]]:
    """In how many ways so many of a rank's groups are chosen that have so many experts of it together."""
    ways = Counter({(0, 0.0): 1})
    for share in mine:
        ways += Counter({(chosen + 1, count + share): times for (chosen, count), times in ways.items()})
    return ways


def _all_missed(mine: float, experts: float, choices: int) -> float:
    """How likely it is that none of so many different experts is mine."""
    return prod(max(0.0, 1 - mine / (experts - number)) for number in range(choices))
