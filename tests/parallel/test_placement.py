"""Which expert lies where: even loads, as many slots as before, and nothing moved for noise."""

import itertools
import random

import pytest

from fivefold.parallel.placement import WORTH_MOVING, fullest, in_order, placed_anew

EVEN = [100] * 8


def test_the_hottest_experts_go_to_different_ranks():
    choices = [400, 300, 10, 10, 10, 10, 30, 20]
    placement = placed_anew(choices, in_order(8), ranks=2)
    assert (placement[0] < 4) != (placement[1] < 4)
    assert fullest(choices, in_order(8), 2) == pytest.approx(720 / 395)
    assert fullest(choices, placement, 2) == pytest.approx(430 / 395)


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 4), (4, 4), (8, 4), (8, 2)])
def test_a_placement_gives_each_expert_a_slot_of_its_own_and_is_no_worse(ranks, groups):
    for seed in range(20):
        choices = [random.Random(seed).randrange(1, 1000) ** 2 for _ in range(16)]
        placement = placed_anew(choices, in_order(16), ranks, groups)
        assert sorted(placement) == list(range(16))
        assert fullest(choices, placement, ranks) <= fullest(choices, in_order(16), ranks)


def test_two_ranks_get_close_to_the_best_there_is():
    for seed in range(20):
        choices = [random.Random(seed).randrange(1, 100) for _ in range(8)]
        halves = [sum(half) for half in itertools.combinations(choices, 4)]
        best = min(max(half, sum(choices) - half) for half in halves) * 2 / sum(choices)
        assert fullest(choices, placed_anew(choices, in_order(8), ranks=2), 2) <= 1.05 * best + WORTH_MOVING


def test_what_gains_little_moves_nothing():
    assert placed_anew([103, 102, 101, 100], in_order(4), ranks=2) == in_order(4)
    assert placed_anew([108, 104, 101, 100], in_order(4), ranks=2) == in_order(4)
    assert placed_anew([120, 110, 90, 80], in_order(4), ranks=2) != in_order(4)


def test_without_choices_all_stay():
    once = placed_anew([400, 300, 10, 10, 10, 10, 30, 20], in_order(8), ranks=2)
    assert placed_anew([0] * 8, once, ranks=2) == once


def test_what_was_moved_before_stays_while_it_is_even():
    choices = [400, 300, 10, 10, 10, 10, 30, 20]
    once = placed_anew(choices, in_order(8), ranks=2)
    assert placed_anew(choices, once, ranks=2) == once
    assert placed_anew(EVEN, once, ranks=2) == once


def test_experts_of_a_group_stay_on_ranks_of_their_own():
    """A token chooses few groups, and so goes to few ranks."""
    choices = [900, 800, 10, 10, 500, 10, 400, 10]
    placement = placed_anew(choices, in_order(8), ranks=4, groups=2)
    assert [slot // 4 for slot in placement] == [0] * 4 + [1] * 4
    assert fullest(choices, placement, 4) < fullest(choices, in_order(8), 4)


def test_groups_of_which_a_rank_has_several_move_as_a_whole():
    choices = [90, 80, 70, 60, 10, 10, 10, 10]
    placement = placed_anew(choices, in_order(8), ranks=2, groups=4)
    assert all(placement[expert + 1] == placement[expert] + 1 for expert in range(0, 8, 2))
    assert fullest(choices, placement, 2) == pytest.approx(190 / 170)


def test_experts_of_groups_that_ranks_cut_move_freely():
    choices = [90, 80, 70, 10, 10, 10]
    assert fullest(choices, placed_anew(choices, in_order(6), ranks=2, groups=3), 2) == pytest.approx(160 / 135)


@pytest.mark.parametrize(("ranks", "groups", "moves"), [(4, 4, False), (8, 1, False), (2, 4, True), (4, 2, True)])
def test_nothing_can_move_where_each_rank_has_one_expert_or_one_group(ranks, groups, moves):
    choices = [900, 800, 500, 10, 10, 10, 400, 10]
    assert (placed_anew(choices, in_order(8), ranks, groups) != in_order(8)) == moves


def test_experts_of_all_groups_are_shared_out_alike_where_ranks_and_groups_do_not_divide_each_other():
    choices = [900, 800, 10, 10, 500, 10, 400, 10, 5, 5, 5, 5]
    assert placed_anew(choices, in_order(12), ranks=2, groups=3) == placed_anew(choices, in_order(12), ranks=2)
