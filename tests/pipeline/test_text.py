"""Schedules are exchanged with torch as CSV files, and a file that cannot be read says where."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from fivefold.errors import UserError
from fivefold.pipeline.check import faults
from fivefold.pipeline.named import SCHEDULES, make_schedule
from fivefold.pipeline.schedule import Action, Pair, Schedule
from fivefold.pipeline.text import from_csv, read_csv, to_csv

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
        ("0F0,0F999999999,0B0\n", "microbatch 1 has no actions, though there are some of microbatch 999999999"),
        ("0F0,0B0\n\n1F0,1B0\n", "line 2: no actions"),
        ("0F0,0B0\n1UNSHARD,1RESHARD\n", "line 2: no actions"),
        ("", "no actions"),
        (" ,\n", "no actions"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_csv(text, "f.csv")


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text(TWO.replace("\n", "\r\n"), encoding="utf-8-sig")
    assert read_csv(path) == from_csv(TWO, "two.csv")


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_named_schedule_comes_back_from_its_text(name: str) -> None:
    schedule = make_schedule(name, 3, 7, SCHEDULES[name].chunks or 2)
    assert from_csv(to_csv(schedule), name) == schedule


def torchs(kind: type[PipelineScheduleMulti], ranks: int = 4, microbatches: int = 8) -> PipelineScheduleMulti:
    """torch's schedule of two stages a rank, which looks at these attributes of a stage only, until it runs."""
    stages = [
        SimpleNamespace(num_stages=2 * ranks, group_size=ranks, group_rank=0, is_first=True, is_last=False, submod=None)
        for _ in range(2)
    ]
    return kind(stages, microbatches, loss_fn=lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("lowered", [False, True], ids=["compute only", "with communication"])
@pytest.mark.parametrize(
    "kind",
    [
        ScheduleInterleaved1F1B,
        ScheduleLoopedBFS,
        ScheduleInterleavedZeroBubble,
        ScheduleZBVZeroBubble,
        ScheduleDualPipeV,
    ],
)
def test_what_torch_writes_is_read_and_sound(kind: type[PipelineScheduleMulti], lowered: bool, tmp_path: Path) -> None:
    file = tmp_path / "torch.csv"
    theirs = torchs(kind)
    theirs._dump_csv(str(file), format="compute_comms" if lowered else "compute_only")
    ours = from_csv(file.read_text(), file.name)
    assert faults(ours) == []
    for rank, steps in theirs.pipeline_order.items():
        assert [str(step) for step in steps if step is not None] == [str(step) for step in ours.ranks[rank]]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("interleaved", ScheduleInterleaved1F1B),
        ("zb-v", ScheduleZBVZeroBubble),
        ("dualpipe-v", ScheduleDualPipeV),
        ("auto", ScheduleDualPipeV),
    ],
)
def test_torch_reads_what_we_write(name: str, kind: type[PipelineScheduleMulti], tmp_path: Path) -> None:
    file = tmp_path / "ours.csv"
    ours = make_schedule(name, 4, 8, 2)
    file.write_text(to_csv(ours))
    theirs = torchs(kind)
    theirs._load_csv(str(file), format="compute_only")
    for rank, steps in theirs.pipeline_order.items():
        assert list(map(str, steps)) == list(map(str, ours.ranks[rank]))
    assert theirs.stage_index_to_group_rank == dict(enumerate(ours.placement))
