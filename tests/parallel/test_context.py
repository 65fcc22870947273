"""Attention over the ranks of cp against the formula in one process, each method, mask and number of heads."""

from __future__ import annotations

import pytest

from tests.parallel.context_case import Case, by_the_formula, errors, joined, on_a_rank
from tests.ranks import Crew

METHODS = ("ring", "gather", "ulysses")


@pytest.mark.parametrize("kv_heads", [1, 3, 4, 12])
@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("world", [2, 4])
def test_output_and_gradients_are_those_of_one_process(
    world: int, method: str, packed: bool, alibi: bool, kv_heads: int, ranks: Crew
) -> None:
    if method == "ulysses" and kv_heads % world:
        pytest.skip("a rule refuses key/value heads that do not divide by cp")
    case = Case(method, packed, alibi, kv_heads)
    found = errors(joined(ranks.run(world, on_a_rank, case)), by_the_formula(case))
    assert max(found.values()) <= 1e-10, found
