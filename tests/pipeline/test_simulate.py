"""The simulator's timelines agree with those drawn by hand: order, transfers, bubble, and memory in its three sizes."""

from __future__ import annotations

import time

import pytest

from fivefold.errors import UserError
from fivefold.pipeline.classic import one_forward_one_backward
from fivefold.pipeline.schedule import Schedule, looped, v_shaped
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.timeline import Timeline
from fivefold.pipeline.times import Sizes, Times
from fivefold.pipeline.zero_bubble import zb_h1
from tests.pipeline.written import schedule

ONE = schedule("0F0 0B0", "1F0 1B0")
"""One microbatch on two ranks."""
TWO = schedule("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")


def spans(timeline: Timeline, rank: int) -> str:
    return " ".join(f"{action}:{start:g}-{end:g}" for action, start, end in timeline.spans[rank])


def transfers(timeline: Timeline) -> list[str]:
    return [f"{t.action} {t.source}>{t.target} {t.start:g}-{t.end:g}" for t in timeline.transfers]


def test_a_microbatch_goes_down_the_ranks_and_its_gradient_comes_back() -> None:
    timeline = simulate(ONE, Times.uniform(2, 1, 2, 3, latency=0.5))
    assert spans(timeline, 0) == "0F0:0-1 0B0:8-13"
    assert spans(timeline, 1) == "1F0:1.5-2.5 1B0:2.5-7.5"
    assert transfers(timeline) == ["0F0 0>1 1-1.5", "1B0 1>0 7.5-8"]
    assert timeline.makespan == 13
    assert timeline.busy == (6, 6)
    assert timeline.idle == (7, 7)


def test_each_stage_takes_its_own_times() -> None:
    timeline = simulate(ONE, Times((1, 4), (2, 5), (3, 6)))
    assert spans(timeline, 0) == "0F0:0-1 0B0:16-21"
    assert spans(timeline, 1) == "1F0:1-5 1B0:5-16"


def test_the_gradient_leaves_after_i_and_does_not_wait_for_w() -> None:
    timeline = simulate(schedule("0F0 0I0 0W0", "1F0 1I0 1W0"), Times.uniform(2, 1, 2, 3))
    assert spans(timeline, 0) == "0F0:0-1 0I0:4-6 0W0:6-9"
    assert spans(timeline, 1) == "1F0:1-2 1I0:2-4 1W0:4-7"


def test_a_pair_is_its_forward_and_then_its_backward_each_as_soon_as_its_input_is_there() -> None:
    paired = schedule("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1")
    assert simulate(paired, Times.uniform(2, 1, 1, 1)) == simulate(
        schedule("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), Times.uniform(2, 1, 1, 1)
    )


def test_a_channel_carries_one_message_at_a_time() -> None:
    """The second activation is made at 2, leaves at 4 when the first is through, and arrives at 7."""
    timeline = simulate(TWO, Times((1, 1), (1, 1), (1, 1), transfer=3))
    assert transfers(timeline)[:2] == ["0F0 0>1 1-4", "0F1 0>1 4-7"]
    assert spans(timeline, 1).startswith("1F0:4-5 1F1:7-8")


def test_latency_keeps_no_message_waiting() -> None:
    timeline = simulate(TWO, Times((1, 1), (1, 1), (1, 1), latency=3))
    assert transfers(timeline)[:2] == ["0F0 0>1 1-4", "0F1 0>1 2-5"]


def test_the_two_directions_of_a_pair_of_ranks_do_not_hold_each_other_up() -> None:
    crossing = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    timeline = simulate(crossing, Times((4, 1), (1, 1), (1, 1), transfer=3))
    assert set(transfers(timeline)) >= {"0F1 0>1 8-11", "1B0 1>0 10-13"}


def test_transfers_without_overlap_keep_both_sides_busy() -> None:
    """Rank 0 sends from 1 to 3, so its second F starts at 3. Rank 1 is free at 4 and must still receive until 6."""
    timeline = simulate(TWO, Times((1, 1), (1, 1), (1, 1), transfer=2, overlap=False))
    assert spans(timeline, 0).startswith("0F0:0-1 0F1:3-4")
    assert spans(timeline, 1) == "1F0:3-4 1F1:6-7 1B0:7-9 1B1:11-13"
    late = simulate(TWO, Times((1, 9), (1, 1), (1, 1), latency=1, transfer=1, overlap=False))
    assert spans(late, 1).startswith("1F0:3-12 1F1:14-23"), "arrived at 6, received from 12 to 14"


def test_stages_of_one_rank_hand_over_without_a_transfer() -> None:
    timeline = simulate(
        schedule("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=v_shaped(2)), Times.uniform(4, 1, 1, 1, latency=10)
    )
    assert sorted(transfers(timeline)) == ["0F0 0>1 1-11", "1B0 1>0 40-50", "2F0 1>0 13-23", "3B0 0>1 26-36"]
    assert spans(timeline, 1) == "1F0:11-12 2F0:12-13 2B0:36-38 1B0:38-40"


def test_the_bubble_is_that_of_the_rank_with_the_longest_span_and_not_of_the_makespan() -> None:
    """Rank 1 has nothing to do before 3 and from 5 to 6, and ends with two long weight gradients at 48."""
    halves = schedule("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    timeline = simulate(halves, Times((3, 1), (1, 1), (1, 20)))
    assert timeline.lengths == (11, 45)
    assert timeline.makespan == 48
    assert timeline.cost == 45
    assert timeline.bubble == pytest.approx(1 / 45, rel=1e-15)


def test_one_rank_has_no_bubble() -> None:
    timeline = simulate(schedule("0F0 0I0 0F1 0W0 0B1"), Times.uniform(1, 0.1, 0.2, 0.3))
    assert timeline.bubble == 0
    assert timeline.idle == pytest.approx([0], abs=1e-15)
    assert timeline.transfers == ()


def test_memory_is_held_from_f_to_i_and_from_i_to_w_and_grows_within_i() -> None:
    split = schedule("0F0 0F1 0I0 0W0 0I1 0W1")
    timeline = simulate(split, Times.uniform(1, 1, 1, 1), Sizes(forward=(1.0,), weight=(0.5,), transient=(0.25,)))
    assert timeline.held(0) == [(0, 1), (1, 2), (2, 2.25), (3, 1.5), (4, 1.25), (5, 0.5), (6, 0)]
    assert timeline.peak == (2.25,)


def test_a_whole_backward_keeps_nothing_for_later() -> None:
    timeline = simulate(schedule("0F0 0B0"), Times.uniform(1, 1, 1, 1), Sizes((1.0,), (9.0,), (0.25,)))
    assert timeline.held(0) == [(0, 1), (1, 1.25), (3, 0)]


def test_chunks_hold_their_share_of_a_rank_and_return_all_of_it() -> None:
    """Thirds do not add up to 1 in binary; what is returned is counted in whole microbatches all the same."""
    stages = looped(1, 3)
    timeline = simulate(schedule("0F0 1F0 2F0 2I0 1I0 0I0 0W0 1W0 2W0", placement=stages), Times.uniform(3, 1, 1, 1))
    assert timeline.peak == (pytest.approx(1.0),)
    assert timeline.held(0)[-1] == (9, 0.0)


def test_1f1b_holds_as_many_activations_as_ranks_are_left() -> None:
    timeline = simulate(one_forward_one_backward(4, 8), Times.uniform(4, 1, 1, 1))
    assert timeline.peak == (4, 3, 2, 1)


def test_ranks_that_wait_for_each_other_are_an_error_and_not_a_short_timeline() -> None:
    with pytest.raises(UserError, match="a circle"):
        simulate(schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), Times.uniform(2, 1, 1, 1))


@pytest.mark.parametrize("made", [one_forward_one_backward(16, 1600), zb_h1(16, 1600)], ids=lambda made: made.name)
def test_16_ranks_and_1600_microbatches_take_under_two_seconds(made: Schedule) -> None:
    start = time.process_time()
    assert simulate(made, Times.uniform(16, 1, 1, 1)).bubble < 0.01
    assert time.process_time() - start < 2
