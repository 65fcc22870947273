"""The one table of fitted numbers stays small, and no number in it belongs to a row, a source or a model."""

from __future__ import annotations

import json

import pytest

from fivefold.plan.constants import FAMILY_LIMIT, FILE, FITTED_FAMILIES, GENERATION_LIMIT, constants
from fivefold.plan.memory.overhead import EXPANDABLE, overhead_of
from fivefold.plan.published.fit import PRIORS, gaps
from fivefold.plan.published.rows import read_rows
from fivefold.plan.software import GENERATIONS, UNFUSED, stack
from tests.plan.runs import small_run

TABLE = json.loads(FILE.read_text(encoding="utf-8"))


def test_a_family_has_at_most_five_constants_and_a_generation_at_most_six() -> None:
    assert (FAMILY_LIMIT, GENERATION_LIMIT) == (5, 6)
    assert set(TABLE) == {"families", "generations"}
    assert all(len(values) <= FAMILY_LIMIT for values in TABLE["families"].values())
    assert all(len(values) <= GENERATION_LIMIT for values in TABLE["generations"].values())


def test_there_are_three_families_and_five_generations() -> None:
    assert tuple(TABLE["families"]) == FITTED_FAMILIES
    assert tuple(TABLE["generations"]) == GENERATIONS
    assert len(GENERATIONS) <= 5


def test_every_constant_is_a_plain_number_with_a_prior() -> None:
    for kind, named in TABLE.items():
        for name, values in named.items():
            assert set(values) == set(PRIORS[kind][name])
            assert all(isinstance(value, float) for value in values.values())


def test_the_allocators_gaps_are_what_the_published_memory_says() -> None:
    """Told by kernels of 2022, and taken for every allocator whose segments cannot grow."""
    assert [name for name, values in TABLE["generations"].items() if "gaps" in values] == [UNFUSED]
    assert gaps(read_rows()) == constants().gaps == TABLE["generations"][UNFUSED]["gaps"]
    run = small_run(gpus=1, dp=1)
    reserved = {name: overhead_of(run, stack(name)).reserved for name in ("megatron-2022", "fsdp-2023", "fivefold")}
    assert reserved == {"megatron-2022": constants().gaps, "fsdp-2023": constants().gaps, "fivefold": EXPANDABLE}


def test_shares_of_a_datasheet_lie_between_nothing_and_all_of_it() -> None:
    for family in constants().families.values():
        assert all(0 < share < 1 for share in (family.matmul, family.bandwidth, family.link, family.nic))
    for generation in constants().generations.values():
        assert 0 < generation.overlap < 1
        assert all(0 < share < 1 for share in generation.attention.values())


@pytest.mark.parametrize(("family", "nearest"), [("Blackwell", "H100"), ("others", "H100"), ("A100", "A100")])
def test_attention_on_a_family_without_a_figure_is_that_of_the_nearest(family: str, nearest: str) -> None:
    generation = constants().generations["flash-2023"]
    assert generation.attention_of(family) == generation.attention[nearest]


@pytest.mark.parametrize(
    ("generation", "family", "source"),
    [
        ("engine-2026", "H100", "engine-2025"),
        ("engine-2026", "A100", "compiled-2024"),
        ("engine-2025", "Blackwell", "engine-2025"),
    ],
)
def test_newer_kernels_keep_what_older_ones_reached_on_a_family(generation: str, family: str, source: str) -> None:
    """And not what newer accelerators make of them."""
    table = constants().generations
    nearest = family if family in table[source].attention else "H100"
    assert table[generation].attention_of(family) == table[source].attention[nearest]


def test_unfused_attention_hands_nothing_on() -> None:
    assert constants().generations["flash-2023"].earlier == {}
