"""The schedule `auto` is at least as good as what is published and written by hand, and keeps its limit of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.errors import UserError
from fivefold.pipeline.check import faults, over_limit
from fivefold.pipeline.greedy import auto
from fivefold.pipeline.named import SCHEDULES, make_schedule
from fivefold.pipeline.polish import polish
from fivefold.pipeline.schedule import looped
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.times import Sizes, Times
from fivefold.pipeline.zero_bubble import zb_h1
from tests.pipeline.test_schedules import PUBLISHED, Published

# Bubbles of ZB-1p and ZB-2p in the paper's tables, in the order of PUBLISHED, and the sizes of its models (table 3).
GREEDY = [
    ((0.1585, 0.0433), (2304, 24)),
    ((0.0674, 0.0026), (2304, 24)),
    ((0.1045, 0.0022), (4096, 32)),
    ((0.1397, 0.0066), (5120, 40)),
    ((0.0576, 0.0028), (5120, 40)),
    ((0.1106, 0.0029), (6144, 48)),
]
ROUNDING = 0.00005
"""The paper's bubbles have four digits."""
SEQUENCE = 1024


def times_of(case: Published) -> Times:
    return Times.uniform(case.ranks, case.forward, case.input, case.weight, case.transfer)


def kept_for_w(hidden: int, heads: int) -> float:
    """What an activation is after I, as a share (Qi et al. 2023, table 1): attention's scores are W's no more."""
    return 32 * hidden / (34 * hidden + 5 * heads * SEQUENCE)


@pytest.mark.parametrize("multiple", [1, 2], ids=["ZB-1p", "ZB-2p"])
@pytest.mark.parametrize(
    ("case", "published", "model"),
    [(case, *row) for case, row in zip(PUBLISHED, GREEDY, strict=True)],
    ids=[f"{case.ranks}x{case.microbatches}" for case in PUBLISHED],
)
def test_the_bubble_is_at_most_the_published_one_at_the_same_limit(
    case: Published, published: tuple[float, float], model: tuple[int, int], multiple: int
) -> None:
    times, limit, weight = times_of(case), multiple * case.ranks, kept_for_w(*model)
    schedule = auto(case.ranks, case.microbatches, 1, times, limit, weight)
    assert over_limit(schedule, Sizes.uniform(schedule.placement, weight), limit) == []
    assert simulate(schedule, times).bubble <= published[multiple - 1] + ROUNDING


@pytest.mark.parametrize(
    "case", [case for case in PUBLISHED if case.microbatches < 128], ids=lambda case: case.microbatches
)
def test_activations_that_stay_whole_until_w_cost_little_more_than_they_must(case: Published) -> None:
    """At a limit of 2p, the last rank has run all but 2p of its W when its last I ends, from which I goes up the ranks.

    So rank 0 is idle for at least (p - 1)(F + I + 2C) - (2p - 1) W: no schedule reaches the published bubble then.
    """
    p, m = case.ranks, case.microbatches
    schedule = auto(p, m, 1, times_of(case), 2 * p)
    timeline = simulate(schedule, times_of(case))
    idle = (p - 1) * (case.forward + case.input + 2 * case.transfer) - (2 * p - 1) * case.weight
    busy = m * (case.forward + case.input + case.weight)
    assert max(timeline.peak) <= 2 * p
    assert idle / (busy + idle) - 1e-9 <= timeline.bubble <= idle / (busy + idle) + 0.002


@pytest.mark.parametrize("weight", [1.0, 0.4])
@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "limit"),
    [(4, 9, 1, 4), (4, 9, 1, 2.5), (3, 8, 2, 3), (3, 8, 2, 3.5), (3, 7, 3, 4), (5, 3, 1, None), (1, 4, 2, None)],
)
def test_it_is_never_worse_than_a_schedule_by_hand_that_fits(
    ranks: int, microbatches: int, chunks: int, limit: float | None, weight: float
) -> None:
    times = uneven(ranks * chunks)
    schedule = make_schedule("auto", ranks, microbatches, chunks, times, limit, weight)
    cost = simulate(schedule, times).cost
    sizes = Sizes.uniform(schedule.placement, weight)
    for name, named in SCHEDULES.items():
        if named.chunks not in (None, chunks) or microbatches < named.fewest(ranks):
            continue
        other = make_schedule(name, ranks, microbatches, chunks)
        if other.placement == schedule.placement and (limit is None or not over_limit(other, sizes, limit)):
            assert cost <= simulate(other, times).cost * (1 + 1e-9)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("spare", [0, 0.3, 1.5])
@pytest.mark.parametrize("weight", [1.0, 0.4, 1.6])
def test_no_limit_is_a_dead_end(chunks: int, spare: float, weight: float) -> None:
    limit = max(1.0, weight) + spare
    for ranks, microbatches in ((1, 3), (2, 5), (3, 2), (4, 7)):
        schedule = auto(ranks, microbatches, chunks, uneven(ranks * chunks), limit, weight)
        assert faults(schedule) == []
        assert over_limit(schedule, Sizes.uniform(schedule.placement, weight), limit) == []


def test_more_memory_is_used_where_it_helps() -> None:
    times = Times.uniform(4, 1.0, 1.0, 1.0, 0.1)
    bubbles = [simulate(auto(4, 12, 1, times, limit), times).bubble for limit in (1, 2, 4, 8)]
    assert bubbles == sorted(bubbles, reverse=True)
    assert len(set(bubbles)) == 4


def test_the_measured_times_decide() -> None:
    """A stage that is twice as slow is the only one without a gap, where enough memory is allowed."""
    times = Times((1.0, 1.0, 2.0, 1.0), (1.0, 1.0, 2.0, 1.0), (1.0, 1.0, 2.0, 1.0), 0.05)
    timeline = simulate(auto(4, 16, 1, times), times)
    assert timeline.lengths[2] == pytest.approx(16 * 6)
    assert timeline.cost == pytest.approx(16 * 6)


@pytest.mark.parametrize("taking", ["forward", "input", "weight", "latency", "nothing on the last rank"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_actions_that_take_no_time_are_no_obstacle(taking: str, chunks: int) -> None:
    """A clock is coarse, and whoever tries something out gives zeros."""
    times = Times.uniform(2 * chunks, 0.0, 0.0, 0.0)
    if taking == "latency":
        times = replace(times, latency=1.0)
    elif taking == "nothing on the last rank":
        times = replace(times, forward=(*(1.0,) * (2 * chunks - 1), 0.0))
    else:
        times = replace(times, **{taking: (1.0,) * (2 * chunks)})
    assert faults(auto(2, 4, chunks, times)) == []


def test_the_same_input_gives_the_same_schedule() -> None:
    assert auto(3, 7, 2, uneven(6), 2.5) == auto(3, 7, 2, uneven(6), 2.5)


def test_transfers_that_take_the_ranks_time_are_no_obstacle() -> None:
    times = replace(uneven(4), overlap=False, transfer=0.3)
    assert faults(auto(4, 6, 1, times, 3)) == []


def test_polishing_moves_what_nobody_waits_for_out_of_the_way() -> None:
    """Rank 1 runs a W just before the I for which rank 0 waits."""
    schedule = zb_h1(2, 2)
    hasty = [str(action) for action in schedule.actions[1]]
    assert hasty == ["1F0", "1I0", "1F1", "1I1", "1W0", "1W1"]
    order = tuple(schedule.ranks[1][place] for place in (0, 1, 4, 2, 3, 5))
    slow = replace(schedule, ranks=(schedule.ranks[0], order))
    times = Times.uniform(2, 1.0, 1.0, 1.0)
    polished = polish(slow, times, Sizes.uniform(looped(2, 1)), 2, steps=5)
    assert simulate(slow, times).cost == 8
    assert polished.timeline.cost == simulate(polished.schedule, times).cost == 7
    assert polish(slow, times, Sizes.uniform(looped(2, 1)), 1, steps=5).schedule == slow


def test_a_limit_below_one_microbatch_is_refused_with_the_smallest() -> None:
    with pytest.raises(UserError, match=r"limit of 0\.9 activations is too small; the smallest is 1,"):
        auto(4, 8, 1, None, 0.9)
    with pytest.raises(UserError, match=r"the smallest is 1\.5,"):
        auto(4, 8, 1, None, 1, weight=1.5)


def test_times_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(UserError, match="times are of 4 stages, and 4 ranks with 2 chunks each have 8"):
        auto(4, 8, 2, Times.uniform(4, 1, 1, 1))


def uneven(stages: int) -> Times:
    """No two stages alike."""
    some = [1 + (7 * stage % 5) / 10 for stage in range(stages)]
    return Times(tuple(some), tuple(1.1 * time for time in some), tuple(0.7 * time for time in some), 0.05)
