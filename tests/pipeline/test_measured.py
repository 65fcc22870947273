"""The record of a measured step: what is written is read again, damage is named, and the times are medians."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.pipeline.measured import Measured
from fivefold.pipeline.schedule import Action
from fivefold.pipeline.times import Times

SPLIT = Measured(
    schedule_csv="0F0,0F1,0I0,0W0,0B1\n1F0,1I0,1F1,1B1,1W0\n",
    schedule_name="mine",
    step=7,
    spans=[
        [("0F0", 10.0, 12.0), ("0F1", 12.0, 16.0), ("0I0", 18.0, 21.0), ("0W0", 21.0, 22.0), ("0B1", 22.0, 30.0)],
        [("1F0", 12.5, 13.5), ("1I0", 13.5, 15.5), ("1F1", 16.5, 17.5), ("1B1", 17.5, 20.5), ("1W0", 20.5, 22.5)],
    ],
    transfer_s=0.5,
    tokens=4096,
)


def stored(tmp_path: Path, values: Any) -> Path:
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps(values))
    return path


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    SPLIT.save(tmp_path / "pipeline.json")
    assert Measured.load(tmp_path / "pipeline.json") == SPLIT
    assert [each.name for each in tmp_path.iterdir()] == ["pipeline.json"]


def test_times_are_medians_and_a_full_backward_is_split_as_its_stage_splits() -> None:
    # stage 0: F 2 and 4; I 3, W 1, so B 8 is an I of 6 and a W of 2. Stage 1: I 2, W 2, so B 3 is two halves
    assert SPLIT.times() == Times((3.0, 1.0), (4.5, 1.75), (1.5, 1.75), transfer=0.5)


def test_a_stage_that_never_splits_takes_the_ratio_of_the_others() -> None:
    record = replace(
        SPLIT,
        schedule_csv="0F0,0B0\n1F0,1I0,1W0\n",
        spans=[[("0F0", 0.0, 1.0), ("0B0", 6.0, 14.0)], [("1F0", 1.0, 2.0), ("1I0", 2.0, 5.0), ("1W0", 5.0, 6.0)]],
    )
    assert record.times() == Times((1.0, 1.0), (6.0, 3.0), (2.0, 1.0), transfer=0.5)


def test_where_nothing_splits_a_backward_is_two_halves() -> None:
    record = replace(
        SPLIT,
        schedule_csv="0F0,0B0\n1F0,1B0\n",
        spans=[[("0F0", 0.0, 1.0), ("0B0", 4.0, 6.0)], [("1F0", 1.0, 2.0), ("1B0", 2.0, 4.0)]],
    )
    assert record.times() == Times((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), transfer=0.5)


def test_the_timeline_starts_at_0_and_has_the_bubble_of_the_longest_rank() -> None:
    timeline = SPLIT.timeline()
    assert timeline.spans[1][0] == (Action("F", 1, 0), 2.5, 3.5)
    assert timeline.makespan == 20.0
    assert timeline.peak == (2.0, 2.0)
    # rank 0 takes 20 s from first to last, and 18 s of actions
    assert SPLIT.bubble == pytest.approx(0.1, abs=1e-12)


def with_span(rank: int, number: int, span: list[Any]) -> dict[str, Any]:
    values = json.loads(json.dumps(asdict(SPLIT)))
    values["spans"][rank][number] = span
    return values


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "it should hold schedule_csv, schedule_name, step, spans, transfer_s, tokens"),
        ({"step": 1}, "it should hold schedule_csv"),
        (asdict(SPLIT) | {"step": "7"}, "step is '7'"),
        (asdict(SPLIT) | {"tokens": True}, "tokens is True"),
        (asdict(SPLIT) | {"transfer_s": -1}, "transfer_s is -1"),
        (asdict(SPLIT) | {"transfer_s": float("nan")}, "transfer_s is nan"),
        (asdict(SPLIT) | {"transfer_s": 1e308}, "transfer_s is 1e+308"),
        (asdict(SPLIT) | {"schedule_csv": "0F0,nonsense\n"}, "'nonsense' is no action"),
        (asdict(SPLIT) | {"schedule_csv": "0F0\n1F0,1B0\n"}, "0B0"),
        (asdict(SPLIT) | {"spans": []}, "spans should be 2 lists"),
        (asdict(SPLIT) | {"spans": [[], []]}, "rank 0 has 5 actions"),
        (with_span(1, 2, ["1F0", 16.5, 17.5]), "rank 1: ['1F0', 16.5, 17.5] stands where 1F1"),
        (with_span(1, 2, ["1F1", 16.5]), "rank 1: ['1F1', 16.5] stands where 1F1"),
        (with_span(0, 1, ["0F1", 16.0, 12.0]), "rank 0: 0F1 starts at 16.0 and ends at 12.0"),
        (with_span(0, 1, ["0F1", 10**400, 10**401]), "rank 0: 0F1 starts at 1000"),
    ],
)
def test_a_damaged_record_is_refused_with_what_is_wrong(tmp_path: Path, values: Any, said: str) -> None:
    path = stored(tmp_path, values)
    with pytest.raises(UserError) as caught:
        Measured.load(path)
    assert f"{path} is damaged (" in str(caught.value)
    assert said in str(caught.value)


def test_a_record_in_which_nothing_took_any_time_is_refused(tmp_path: Path) -> None:
    values = asdict(SPLIT)
    values["spans"] = [[(action, start, start) for action, start, _ in spans] for spans in values["spans"]]
    with pytest.raises(UserError, match="none of its actions took any time"):
        Measured.load(stored(tmp_path, values))


def test_a_record_cut_short_is_refused(tmp_path: Path) -> None:
    path = stored(tmp_path, asdict(SPLIT))
    path.write_text(path.read_text()[:-9])
    with pytest.raises(UserError, match=r"pipeline\.json is damaged"):
        Measured.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"pipeline\.json is damaged"):
        Measured.load(path)


def test_a_record_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*pipeline\.json: No such file"):
        Measured.load(tmp_path / "pipeline.json")
