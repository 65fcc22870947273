"""The schedules that are written by hand have the bubble and the memory that their papers state, and those of torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest

from fivefold.config import schedules as demands
from fivefold.errors import UserError
from fivefold.pipeline.check import faults
from fivefold.pipeline.named import SCHEDULES, Named, make_schedule, placement_of
from fivefold.pipeline.schedule import Pair, Schedule, looped, v_shaped
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.timeline import Timeline
from fivefold.pipeline.times import Times

BY_HAND = [name for name in SCHEDULES if name != "auto"]
SIZES = [(1, 1), (1, 5), (2, 1), (2, 7), (3, 2), (4, 4), (4, 9), (5, 16), (8, 24)]
"""Ranks and microbatches: one of each, fewer microbatches than ranks, no multiple, many."""


class Published(NamedTuple):
    """Times in ms and bubbles of Qi et al. 2023 (2401.10241), tables 5, 8, 9 and 10."""

    ranks: int
    microbatches: int
    forward: float
    input: float
    weight: float
    transfer: float
    chunks: int
    """Of the interleaved schedule; inferred, as the paper does not tell."""
    bubbles: dict[str, float]


PUBLISHED = [
    Published(*row, dict(zip(("1f1b", "interleaved", "zb-h1", "zb-h2"), bubbles, strict=True)))
    for *row, bubbles in (
        (8, 24, 18.522, 18.086, 9.337, 0.601, 3, (0.2431, 0.1055, 0.1585, 0.1083)),
        (8, 64, 18.546, 18.097, 9.321, 0.762, 3, (0.124, 0.0443, 0.0674, 0.0444)),
        (8, 32, 29.802, 29.428, 19.53, 0.577, 4, (0.1898, 0.0628, 0.1045, 0.0559)),
        (16, 48, 11.347, 11.248, 8.132, 0.377, 3, (0.2552, 0.1104, 0.1397, 0.0672)),
        (16, 128, 11.325, 11.308, 8.109, 0.378, 3, (0.1251, 0.0445, 0.0576, 0.0266)),
        (32, 128, 10.408, 10.204, 7.703, 0.408, 2, (0.2168, 0.1164, 0.1106, 0.049)),
    )
]


def run(schedule: Schedule) -> Timeline:
    """Its timeline where a rank's F, I and W take 1 each, and transfers nothing."""
    share = len(schedule.ranks) / schedule.stages
    return simulate(schedule, Times.uniform(schedule.stages, share, share, share))


@pytest.mark.parametrize("name", BY_HAND)
def test_it_is_sound_for_any_number_of_ranks_and_microbatches(name: str) -> None:
    named = SCHEDULES[name]
    for ranks, more, chunks in product(range(1, 7), range(10), [named.chunks] if named.chunks else [1, 2, 3, 5]):
        schedule = make_schedule(name, ranks, named.fewest(ranks) + more, chunks)
        assert (schedule.name, faults(schedule)) == (name, [])
        assert schedule.placement == placement_of(name, ranks, chunks)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_naive_runs_one_microbatch_at_a_time(p: int, m: int) -> None:
    timeline = run(make_schedule("naive", p, m))
    assert timeline.makespan == pytest.approx(3 * m * p)
    assert timeline.peak == (1,) * p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_and_1f1b_have_the_bubble_of_their_papers(p: int, m: int) -> None:
    for name in ("gpipe", "1f1b"):
        assert run(make_schedule(name, p, m)).bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe_holds_all_microbatches_and_1f1b_those_between_its_rank_and_the_last(p: int, m: int) -> None:
    assert run(make_schedule("gpipe", p, m)).peak == (m,) * p
    assert run(make_schedule("1f1b", p, m)).peak == tuple(min(m, p - rank) for rank in range(p))


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
@pytest.mark.parametrize(("p", "m"), [(2, 7), (4, 4), (4, 8), (4, 9), (4, 15), (5, 16), (8, 24)])
def test_chunks_divide_the_bubble_whether_or_not_the_ranks_divide_the_microbatches(p: int, m: int, chunks: int) -> None:
    ideal = (p - 1) / chunks / (m + (p - 1) / chunks)
    assert run(make_schedule("interleaved", p, m, chunks)).bubble == pytest.approx(ideal)


def test_interleaved_holds_what_its_groups_need() -> None:
    """9 microbatches on 4 ranks pass in groups of 4 and 5, so rank 0 runs (3 - 1) x 5 + 2 x 3 chunks ahead."""
    assert run(make_schedule("interleaved", 4, 8, 3)).peak[0] == pytest.approx((2 * 4 + 6 + 1) / 3)
    assert run(make_schedule("interleaved", 4, 9, 3)).peak[0] == pytest.approx((2 * 5 + 6 + 1) / 3)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b_in_the_memory_of_its_first_rank(p: int, m: int) -> None:
    timeline = run(make_schedule("zb-h1", p, m))
    assert timeline.bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    assert max(timeline.peak) <= p


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_h2_has_no_bubble_in_nearly_twice_the_memory(p: int, m: int) -> None:
    timeline = run(make_schedule("zb-h2", p, m))
    assert max(timeline.peak) <= 2 * p - 1
    if m >= 2 * p - 1:
        assert timeline.bubble == pytest.approx(0)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_v_has_no_bubble_in_the_memory_of_1f1b(p: int, m: int) -> None:
    timeline = run(make_schedule("zb-v", p, m, 2))
    assert max(timeline.peak) <= p
    if m >= 2 * p - 1:
        assert timeline.bubble == pytest.approx(0)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 7), (4, 8), (8, 24)])
def test_dualpipe_v_runs_in_pairs_and_holds_half_an_activation_more(p: int, m: int) -> None:
    """Published are 2p + 1 activations of a chunk, and an idle time of (p - 1)(F&B + B - 3W), which is p - 1 here.

    It is half of that, because what F gives leaves before the pair's B.
    """
    schedule = make_schedule("dualpipe-v", p, m, 2)
    timeline = run(schedule)
    assert max(timeline.peak) == p + 0.5
    assert timeline.cost == pytest.approx(3 * m + (p - 1) / 2)
    for rank, steps in enumerate(schedule.ranks):
        apart = 1 if rank == p - 1 else 0
        assert sum(isinstance(step, Pair) for step in steps) == 2 * m - 3 * p + rank + 1 - apart


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"{case.ranks}x{case.microbatches}")
@pytest.mark.parametrize(
    ("name", "tolerance"), [("1f1b", 1e-3), ("zb-h1", 1e-3), ("zb-h2", 1e-2), ("interleaved", 1e-2)]
)
def test_the_bubble_is_the_published_one(case: Published, name: str, tolerance: float) -> None:
    chunks = case.chunks if name == "interleaved" else 1
    schedule = make_schedule(name, case.ranks, case.microbatches, chunks)
    times = (case.forward / chunks, case.input / chunks, case.weight / chunks, case.transfer)
    bubble = simulate(schedule, Times.uniform(schedule.stages, *times)).bubble
    assert bubble == pytest.approx(case.bubbles[name], abs=tolerance)


def test_what_is_named_is_what_the_rules_know() -> None:
    assert list(SCHEDULES) == list(demands.SCHEDULES)
    for name, named in SCHEDULES.items():
        known = demands.SCHEDULES[name]
        assert (named.chunks, named.splits, named.fewest(4)) == (known.chunks, known.splits, known.fewest(4))
        schedule = make_schedule(name, 2, named.fewest(2), named.chunks or 2)
        assert any(action.kind == "W" for _, action in schedule.all_actions()) == named.splits


def test_stages_lie_where_they_are_said_to() -> None:
    assert placement_of("interleaved", 2, 3) == placement_of("auto", 2, 3) == looped(2, 3) == (0, 1, 0, 1, 0, 1)
    assert placement_of("zb-v", 3, 2) == placement_of("auto", 3, 2) == v_shaped(3) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (None, "schedule own: what makes it returned a NoneType"),
        (replace(make_schedule("gpipe", 2, 4), placement=(1, 0)), r"made for the ranks \(1, 0\), .* says \(0, 1\)"),
    ],
)
def test_one_of_ones_own_that_makes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, made: Any, says: str
) -> None:
    own = Named(chunks=1, splits=False, make=lambda wanted: made)
    monkeypatch.setattr("fivefold.plugins.find", lambda group, name, shipped: own)
    with pytest.raises(UserError, match=says):
        make_schedule("own", 2, 4)


def test_one_of_ones_own_has_the_name_under_which_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    gpipe = make_schedule("gpipe", 2, 4)
    own = Named(chunks=1, splits=False, make=lambda wanted: gpipe)
    monkeypatch.setattr("fivefold.plugins.find", lambda group, name, shipped: own)
    assert make_schedule("own", 2, 4).name == "own"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (("2f2b", 4, 8), "no schedules called '2f2b'"),
        (("1f1b", 0, 8), "0 ranks"),
        (("1f1b", 4, 0), "0 microbatches"),
        (("interleaved", 4, 8, 0), "0 chunks"),
        (("1f1b", 4, 8, 2), "1f1b has 1 chunk a rank, not 2"),
        (("zb-v", 4, 8, 1), "zb-v has 2 chunks a rank, not 1"),
        (("dualpipe-v", 4, 7, 2), "at least 8 microbatches a step, not 7"),
    ],
)
def test_what_cannot_be_is_refused(asked: tuple[str, int, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_schedule(*asked)
