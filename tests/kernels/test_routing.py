"""What routing decides of whole sequences."""

import pytest
import torch

from fivefold.config.run import Experts
from fivefold.kernels.routing import capacity, sort_by_expert, within_capacity, without_dropped

FOUR = Experts(experts=4, top_k=2, ffn=1)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [(1e-300, 1), (0.5, 5), (1.0, 10), (1.01, 11), (2.0, 20), (1e30, 20), (1e308, 20)],
)
def test_an_expert_takes_its_share_rounded_up_and_never_more_than_there_are_tokens(factor, expected):
    assert capacity(factor, 20, FOUR) == expected


def test_the_first_choices_of_each_sequence_are_kept():
    experts_bSk = torch.tensor([[[0, 1], [0, 2], [0, 3]], [[3, 0], [2, 3], [1, 3]]])
    kept = within_capacity(experts_bSk, 4, capacity(1.0, 3, FOUR))
    assert kept.tolist() == [
        [[True, True], [True, True], [False, True]],
        [[True, True], [True, True], [True, False]],
    ]


def test_dropped_choices_lie_behind_all_others_and_have_no_place():
    choices = sort_by_expert(torch.tensor([[0, 2], [2, 1], [0, 1]]), experts=3)
    kept = without_dropped(choices, torch.tensor([[True, False], [True, True], [False, True]]))
    assert kept.order_r.tolist() == [0, 3, 5, 2, 4, 1]
    assert kept.places_tk.tolist() == [[0, -1], [3, 1], [-1, 2]]
    assert kept.ends_e.tolist() == [1, 3, 4]
    assert kept.ends_e.dtype == torch.int32


@pytest.mark.parametrize("tokens", [0, 3])
def test_where_all_or_none_are_dropped_nothing_else_changes(tokens):
    experts_tk = torch.tensor([[0, 2], [2, 1], [0, 1]])[:tokens]
    choices = sort_by_expert(experts_tk, experts=3)
    all_kept, none = (without_dropped(choices, torch.full_like(experts_tk, kept, dtype=torch.bool)) for kept in (1, 0))
    assert [each.tolist() for each in all_kept] == [each.tolist() for each in choices]
    assert none.order_r.tolist() == choices.order_r.tolist()
    assert none.places_tk.tolist() == [[-1, -1]] * tokens
    assert none.ends_e.tolist() == [0, 0, 0]
