"""How many ranks a token reaches whose experts are spread over them. Imports no torch."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import ceil, comb, prod

from fivefold.config.run import Experts


def ranks_reached(moe: Experts, ranks: float) -> float:
    """The mean number of `ranks`, which share out the experts evenly, that have experts of a token.

    Its groups and, in them, its experts are taken as drawn by lot: routing that prefers some reaches fewer ranks.
    """
    return _ranks_reached(moe.experts, moe.top_k, moe.groups, moe.top_groups, ranks)


def tokens_arriving(moe: Experts, ranks: float, hot: float = 1.0) -> float:
    """Tokens that come to one of so many ranks, for each of its own, if it has `hot` times its share of the choices.

    Then it is reached as it would be by as many draws with that share; at most by all tokens.
    """
    missed, missed_if_even = ((1 - min(1.0, factor / ranks)) ** moe.top_k for factor in (hot, 1.0))
    more = (1 - missed) / (1 - missed_if_even) if ranks > 1 else 1.0
    return min(ranks, ranks_reached(moe, ranks) * more)


def goes_by_node(moe: Experts, ep: int, near: int) -> bool:
    """Whether tokens go to the nodes of their experts first, of `near` ranks each, and then inside them.

    It has to spare the network a tenth of what goes straight, or the second leg would not be worth it: links are about
    ten times as fast. With one choice a token it spares nothing.
    """
    if not 1 < near < ep or ep % near:
        return False
    return ranks_reached(moe, ep / near) <= 0.9 * ranks_reached(moe, ep)


@lru_cache(maxsize=4096)
def _ranks_reached(experts: int, top_k: int, groups: int, top_groups: int, ranks: float) -> float:
    size, of_group = experts / ranks, experts / groups
    ends = [(number * size, min(experts, (number + 1) * size)) for number in range(ceil(ranks))]
    shares = Counter(_shares(first, last, of_group, groups) for first, last in ends)
    reached = 0.0
    for mine, times in shares.items():
        for (chosen, count), ways in _choices(mine).items():
            others = top_groups - chosen
            if 0 <= others <= groups - len(mine):
                likely = ways * comb(groups - len(mine), others) / comb(groups, top_groups)
                reached += times * likely * (1 - _all_missed(count, of_group * top_groups, top_k))
    return max(1.0, reached)


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
