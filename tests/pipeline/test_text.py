"""Schedules are exchanged with torch as CSV files, and a file that cannot be read says where."""

from __future__ import annotations

import pytest

from fivefold.errors import UserError
from fivefold.pipeline.schedule import Action, Pair, Schedule
from fivefold.pipeline.text import from_csv, to_csv

TWO = "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1W0,1B1\n"


def test_a_line_is_a_rank_and_a_cell_an_action() -> None:
    schedule = from_csv(TWO, "two")
    assert schedule.ranks[0] == (Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1))
    assert (schedule.name, schedule.placement, schedule.microbatches) == ("two", (0, 1), 2)
    assert to_csv(schedule) == TWO


def test_pairs_are_written_as_torch_writes_them() -> None:
    pair = Pair(Action("F", 0, 1), Action("B", 1, 0))
    steps = (Action("F", 0, 0), Action("F", 1, 0), pair, Action("F", 1, 1), Action("B", 0, 0), Action("B", 1, 1))
    schedule = Schedule("v", ((*steps, Action("B", 0, 1)),), (0, 0), 2)
    assert "(0F1;1B0)OVERLAP_F_B" in to_csv(schedule)
    assert from_csv(to_csv(schedule), "v") == schedule


def test_idle_slots_and_what_follows_from_the_actions_are_left_out() -> None:
    """The second text is torch's format `compute_comms` of the first."""
    idle = "0F0,0F1,,,0B0,0B1\n,1F0,1I0,1F1,1W0,1B1\n"
    lowered = (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\r\n"
        "1UNSHARD,1RECV_F0,1F0,1I0,1SEND_B0,1RECV_F1,1F1,1W0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\r\n"
    )
    assert from_csv(idle, "x") == from_csv(lowered, "x") == from_csv(TWO, "x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0X0,0B0\n", r"f\.csv, line 1, cell 2: '0X0' is no action"),
        ("0F0,0B0\n1F0,1B\n", r"line 2, cell 2: '1B' is no action"),
        ("0F0,-1B0\n", r"line 1, cell 2: '-1B0' is no action"),
        ("0F0,(0F1;0W0)OVERLAP_F_B\n", r"line 1, cell 2: '\(0F1;0W0\)OVERLAP_F_B' does not pair"),
        ("0F0,(0F1;0B)OVERLAP_F_B\n", r"line 1, cell 2: '0B' is no action"),
        ("0F0,0B0\n1F0,,0W0\n", r"line 2, cell 3: 0W0 is of stage 0, whose other actions are on line 1"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no actions, though there are some of stage 2 on line 2"),
        ("0F0,0B0\n\n1F0,1B0\n", "line 2: no actions"),
        ("0F0,0B0\n1UNSHARD,1RESHARD\n", "line 2: no actions"),
        ("", "no actions"),
        (" ,\n", "no actions"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_csv(text, "f.csv")
