"""Each source of a validation can be told from the others in its tables."""

from __future__ import annotations

from fivefold.plan.published.rows import read_rows, sources
from fivefold.plan.published.source_names import WIDTH, short_names

REPOSITORY = "someone/benchmarks scripts/training/results/of/the/year/README.md section"


def test_the_shipped_sources_are_all_different_and_short() -> None:
    found = short_names(sources(read_rows()))
    assert len(set(found.values())) == len(found) > 25
    assert max(map(len, found.values())) <= WIDTH


def test_what_sections_of_one_file_share_is_left_out() -> None:
    names = [f'{REPOSITORY} "H100 {kind}"' for kind in ("bf16", "fp8")]
    assert [*short_names(names).values()] == ['someone/benchmarks ... bf16"', 'someone/benchmarks ... fp8"']


def test_short_names_stay_and_a_long_one_alone_loses_its_end() -> None:
    found = short_names(["a short name", "b " + "long " * 20])
    assert found["a short name"] == "a short name"
    assert list(found.values())[1].endswith(" long l ...")


def test_names_that_would_look_alike_are_shown_whole() -> None:
    names = ["c " + "long " * 20 + end for end in ("one", "two")] + ["c " + "other " * 20]
    assert list(short_names(names).values())[:2] == names[:2]
