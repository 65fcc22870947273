"""What routing decides of whole sequences."""

import pytest
import torch

from fivefold.config.run import Experts
from fivefold.kernels.routing import capacity, within_capacity

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
