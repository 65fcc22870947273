"""The checker names the action that is missing, doubled, astray or circular, and where it stands."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from fivefold.errors import UserError
from fivefold.pipeline.check import faults, over_limit, require_sound
from fivefold.pipeline.classic import one_forward_one_backward
from fivefold.pipeline.schedule import looped, v_shaped
from fivefold.pipeline.times import Sizes
from fivefold.pipeline.zero_bubble import zb_h1
from tests.pipeline.written import schedule

LAST = "1F0 1B0 1F1 1B1"
"""A sound last rank of two."""


def test_a_sound_schedule_has_no_faults() -> None:
    assert faults(schedule("0F0 0F1 0B0 0B1", LAST)) == []
    assert faults(schedule("0F0 0F1 0I0 0W0 0B1", "1F0 (1F1;1I0)OVERLAP_F_B 1B1 1W0")) == []
    require_sound(schedule("0F0 0B0"))


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        ("0F0 0F1 0B0", "0B1 is missing, or 0I1 and 0W1: rank 0 never runs backward of it"),
        ("0F0 0B0 0B1", "0F1 is missing: rank 0 never runs forward of microbatch 1 in stage 0"),
        ("0F0 0F1 0B0 0I1", "0W1 is missing: 0I1 (rank 0, place 3) leaves the weight gradient to it"),
        ("0F0 0F1 0B0 0W1", "0I1 is missing: 0W1 (rank 0, place 3) computes the weight gradient only"),
        ("0F0 0F1 0B0 0B1 0F1", "0F1 (rank 0, place 4) is doubled: it is also at rank 0, place 1"),
        ("0F0 0F1 0B0 0B1 0W1", "0W1 (rank 0, place 4) is doubled: 0B1 (rank 0, place 3) computes the same"),
        ("0F0 0F1 0B0 0I1 0B1", "0I1 (rank 0, place 3) is doubled: 0B1 (rank 0, place 4) computes the same"),
        ("0F0 0B1 0F1 0B0", "0B1 (rank 0, place 1) comes before 0F1 (rank 0, place 2), which it needs"),
        ("0F0 0F1 0W0 0I0 0B1", "0W0 (rank 0, place 2) comes before 0I0 (rank 0, place 3), which it needs"),
    ],
)
def test_a_fault_within_a_rank_is_named_with_its_place(first: str, fault: str) -> None:
    assert faults(schedule(first, LAST, microbatches=2)) == [fault]


def test_an_action_on_the_wrong_rank_is_named_with_the_right_one() -> None:
    assert faults(schedule("0F0 0F1 0B0", f"{LAST} 0B1")) == [
        "0B1 (rank 1, place 4) is on the wrong rank: stage 0 is on rank 0"
    ]
    assert faults(schedule("0F0 0F1 0B0 0B1", f"{LAST} 0B1")) == [
        "0B1 (rank 1, place 4) is on the wrong rank: stage 0 is on rank 0",
        "0B1 (rank 1, place 4) is doubled: it is also at rank 0, place 3",
    ]


def test_a_stage_or_microbatch_that_does_not_exist_is_named() -> None:
    known = "there are stages 0 to 1, microbatches 0 to 1 and the kinds F, B, I, W"
    assert faults(schedule("0F0 0F1 0B0 0B1 2F0 0F2", LAST, microbatches=2)) == [
        f"2F0 (rank 0, place 4) does not exist: {known}",
        f"0F2 (rank 0, place 5) does not exist: {known}",
    ]


def test_the_place_of_an_action_in_a_pair_is_that_of_the_pair() -> None:
    assert faults(schedule("0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B0 1B1")) == [
        "1B0 (rank 1, place 2) is doubled: it is also at rank 1, place 1"
    ]


def test_stages_that_hand_over_on_one_rank_are_in_order() -> None:
    v = v_shaped(2)
    assert faults(schedule("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=v)) == []
    assert faults(schedule("0F0 3F0 3B0 0B0", "2F0 1F0 2B0 1B0", placement=v)) == [
        "2F0 (rank 1, place 0) comes before 1F0 (rank 1, place 1), which it needs"
    ]
    assert faults(schedule("0F0 3F0 3I0 0I0 3W0 0W0", "1F0 2F0 1I0 2I0 1W0 2W0", placement=v)) == [
        "1I0 (rank 1, place 2) comes before 2I0 (rank 1, place 3), which it needs"
    ]


def test_a_circle_is_told_action_by_action() -> None:
    assert faults(schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1")) == [
        "0B0 (rank 0, place 1) waits for 1B0, which comes after 1F1 (rank 1, place 1), which waits for 0F1, "
        "which comes after 0B0 (rank 0, place 1): a circle, in which none of them ever runs"
    ]


def test_a_circle_leaves_out_the_ranks_that_only_wait_for_it() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 and that for rank 1."""
    found = faults(schedule("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1B1 1W0", "2F0 2F1 2B0 2B1"))
    assert found == [
        "1I0 (rank 1, place 1) waits for 2B0, which comes after 2F1 (rank 2, place 1), which waits for 1F1, "
        "which comes after 1I0 (rank 1, place 1): a circle, in which none of them ever runs"
    ]


def test_a_circle_names_the_half_that_makes_the_gradient() -> None:
    found = faults(schedule("0F0 0B0 0F1 0B1", "1F0 1F1 1I0 1I1 1W0 1W1"))
    assert [fault.split(":")[0] for fault in found] == [
        "0B0 (rank 0, place 1) waits for 1I0, which comes after 1F1 (rank 1, place 1), which waits for 0F1, "
        "which comes after 0B0 (rank 0, place 1)"
    ]


def test_a_circle_through_an_action_that_is_next_on_its_rank_says_so() -> None:
    found = faults(schedule("2F0 0F0 2B0 0B0", "1F0 3F0 3B0 1B0", placement=looped(2, 2)))
    assert [fault.split(":")[0] for fault in found] == [
        "2F0 (rank 0, place 0) waits for 1F0 (rank 1, place 0), which waits for 0F0, "
        "which comes after 2F0 (rank 0, place 0)"
    ]


def test_many_faults_of_one_kind_are_told_short_and_every_kind_is_told() -> None:
    found = faults(replace(one_forward_one_backward(2, 20), microbatches=30))
    assert found[0] == "0F20 is missing: rank 0 never runs forward of microbatch 20 in stage 0"
    assert found[-1] == "and 36 more such faults"
    assert len(found) == 5
    five = faults(schedule("0F0 0F0 0F0 0F0 0F0 0F0 0B0"))
    assert [fault.split()[0] for fault in five] == ["0F0"] * 5, (
        "a fifth takes no more room than saying that there is one"
    )
    assert [fault.split()[0] for fault in faults(schedule("0F0 0B0 0F0 9F0", "1F0 1F1 1I0", microbatches=1))] == [
        "9F0",
        "1F1",
        "0F0",
        "1W0",
    ]


def test_every_stage_lies_on_a_rank_and_every_rank_has_a_stage() -> None:
    assert faults(schedule("0F0 0B0", "", placement=(0, 2))) == [
        "stage 1 is on no rank: its placement says 2, and there are ranks 0 to 1",
        "rank 1 has no stage; there are 2 stages for 2 ranks",
    ]
    assert faults(schedule("", "", microbatches=0)) == ["there are 0 microbatches; a step has at least 1"]


def test_what_is_required_to_be_sound_is_refused_with_every_fault() -> None:
    with pytest.raises(UserError) as refused:
        require_sound(schedule("0F0 0F0 0B0", "1F0 1I0"))
    assert str(refused.value) == (
        "schedule written cannot run:\n"
        "  0F0 (rank 0, place 1) is doubled: it is also at rank 0, place 0\n"
        "  1W0 is missing: 1I0 (rank 1, place 1) leaves the weight gradient to it"
    )


def test_a_memory_limit_is_checked_rank_by_rank() -> None:
    made = one_forward_one_backward(4, 8)
    sizes = Sizes.uniform(made.placement, transient=0.5)
    assert over_limit(made, sizes, 4.5) == []
    assert over_limit(made, sizes, 3.5) == [
        "0F3 (rank 0, place 3) runs with 4 activations held: the limit is 3.5, the rank's most 4.5"
    ]
    assert [line.split()[0] for line in over_limit(made, sizes, 2.25)] == ["0F2", "1F2", "2B0"]


def test_three_tenths_are_within_a_limit_of_0_3_although_binary_fractions_are_not() -> None:
    tenth = Sizes((0.1,), (0.0,), (0.0,))
    assert 3 * 0.1 > 0.3
    assert over_limit(schedule("0F0 0F1 0F2 0B0 0B1 0B2"), tenth, 0.3) == []


def test_16_ranks_and_1600_microbatches_are_checked_in_under_two_seconds() -> None:
    made = zb_h1(16, 1600)
    start = time.process_time()
    assert faults(made) == []
    assert time.process_time() - start < 2
