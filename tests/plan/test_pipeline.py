"""What a plan and `check` say of a pipeline: its stages, its schedule, its bubble, and what each rank keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.pipeline.named import make_schedule
from fivefold.pipeline.text import to_csv
from fivefold.plan.overview import overview
from fivefold.plan.pipeline import Outlook
from fivefold.plan.planned import plan
from tests.plan.runs import SMALL, llama_405b, small_run

DEEP = SMALL.model_copy(update={"layers": 12, "vocab": 1})


def with_batch(run: Run, global_size: int) -> Run:
    return run.model_copy(update={"batch": run.batch.model_copy(update={"global_size": global_size})})


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12)])
def test_the_bubble_is_that_of_equal_times(p: int, m: int) -> None:
    """(p - 1) / (m + p - 1) of 1f1b; half as much work waits with two chunks; zb-h1 has a third of the first."""
    outlook = Outlook.of(make_schedule("1f1b", p, m))
    assert outlook.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert outlook.peak_activations == tuple(float(min(m, p - rank)) for rank in range(p))
    assert Outlook.of(make_schedule("zb-h1", p, m)).bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    looped = Outlook.of(make_schedule("interleaved", p, m, chunks=2))
    assert looped.bubble == pytest.approx((p - 1) / 2 / (m + (p - 1) / 2))


def test_a_plan_shows_the_schedule_and_what_each_pipeline_rank_has() -> None:
    lines = plan(with_batch(small_run(DEEP, pp=3, chunks=2, schedule="zb-v", dp=1), 18)).ranks().lines()
    assert lines[3].split() == ["stage", "pp", "layers", "numbers", "and"]
    stages = enumerate((0, 1, 2, 2, 1, 0))
    assert [line.split()[:3] for line in lines[4:10]] == [[str(stage), str(rank), "2"] for stage, rank in stages]
    assert lines[11].startswith("schedule zb-v: 6 stages on 3 ranks, 9 microbatches a step, at most 3 kept, bubble 0.0")
    assert lines[13].split(maxsplit=3) == ["pp", "stages", "layers", "microbatches kept at most"]
    assert [line.split()[:4] for line in lines[14:17]] == [
        ["0", "0,", "5", "4"],
        ["1", "1,", "4", "4"],
        ["2", "2,", "3", "4"],
    ]
    assert lines[16].split()[-1] == "3"


def test_a_plan_as_json_has_every_number_of_the_schedule() -> None:
    found = plan(small_run(pp=2, dp=2)).ranks().json()
    assert found["schedule"] == {
        "name": "1f1b",
        "microbatches": 12,
        "placement": (0, 1),
        "bubble": pytest.approx(1 / 13),
        "peak_activations": (2.0, 1.0),
    }
    assert found["stages"][1] == {"stage": 1, "pp": 1, "first_layer": 3, "layers": 2, "offloaded_layers": []}
    assert plan(small_run(dp=2)).ranks().json()["schedule"] is None


def test_one_stage_has_no_schedule_to_show() -> None:
    lines = plan(small_run(dp=2)).ranks().lines()
    assert not any("schedule" in line for line in lines)
    assert lines[3].split() == ["stage", "layers", "numbers", "and"]


def test_a_plan_shows_which_layers_activations_are_offloaded() -> None:
    run = small_run(DEEP, pp=2, dp=1).model_copy(update={"offload": ["heavy-activations"]})
    found = plan(run).ranks()
    assert found.lines()[3].split() == ["stage", "pp", "layers", "numbers", "offloaded", "and"]
    assert found.lines()[4].split() == ["0", "0", "6", "0", "to", "5", "0,", "1", "embedding"]
    assert [stage["offloaded_layers"] for stage in found.json()["stages"]] == [[0, 1], []]


def test_check_says_the_schedule_in_one_line() -> None:
    (line,) = (line for line in overview(llama_405b()).lines() if line.startswith("  schedule"))
    assert line == (
        "  schedule 1f1b: 16 stages on 16 ranks, 16 microbatches a step, at most 16 kept, bubble 0.484 (F = I = W)"
    )
    by_gpus = overview(small_run(pp=2, gpus=4))
    assert by_gpus.schedule == overview(small_run(pp=2, dp=2)).schedule
    assert overview(small_run(dp=2)).schedule is None
    assert overview(small_run()).schedule is None


def test_check_without_ranks_says_what_it_knows() -> None:
    assert overview(small_run(pp=2)).schedule == "1f1b: 2 stages on 2 ranks; --gpus N tells its bubble"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A schedule of 1f1b on two ranks with four microbatches."""
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(make_schedule("1f1b", 2, 4)))
    return path


def run_with(file: Path, **parallel: int) -> Run:
    return with_batch(small_run(pp=2, schedule=str(file), **parallel), 8)


def test_a_schedule_from_a_file_is_planned_like_one_by_name(file: Path) -> None:
    assert plan(run_with(file, dp=1)).schedule.ranks == make_schedule("1f1b", 2, 4).ranks  # type: ignore[union-attr]
    assert overview(run_with(file)).schedule == (
        "mine.csv: 2 stages on 2 ranks, 4 microbatches a step, at most 2 kept, bubble 0.200 (F = I = W)"
    )


def test_a_schedule_for_another_run_is_refused_with_all_its_numbers(file: Path) -> None:
    wrong = with_batch(small_run(pp=3, chunks=2, schedule=str(file), dp=2).model_copy(update={"model": DEEP}), 12)
    with pytest.raises(UserError) as caught:
        plan(wrong)
    assert str(caught.value).endswith(
        "mine.csv is not for this run: it has 2 ranks, but parallel.pp = 3; it has 2 stages, but parallel.pp x "
        "parallel.chunks = 6; it has 4 microbatches, but batch.global_size / (batch.micro_size x dp) = 3"
    )
    parallel = wrong.parallel.model_copy(update={"dp": "auto"})
    with pytest.raises(UserError, match=r"it has 2 ranks, but parallel\.pp = 3; it has 2 stages"):
        overview(wrong.model_copy(update={"parallel": parallel}))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("1F3,", "", "1F3"),
        ("1F3,", "1F3,1F3,", "1F3"),
        ("0F0,0F1,0B0", "0B0,0F0,0F1", "0B0"),
        ("0F0", "0X0", "line 1, cell 1: '0X0' is no action"),
    ],
)
def test_a_file_with_a_missing_doubled_or_circular_action_is_refused_with_the_action(
    file: Path, old: str, new: str, says: str
) -> None:
    """Before anything is launched: by a plan and by `check`, with and without a number of ranks."""
    file.write_text(file.read_text().replace(old, new, 1))
    for refused in (lambda: plan(run_with(file, dp=1)), lambda: overview(run_with(file))):
        with pytest.raises(UserError) as caught:
            refused()
        assert says in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"mine\.csv is no text"):
        plan(run_with(file, dp=1))
    file.unlink()
    for refused in (lambda: plan(run_with(file, dp=1)), lambda: overview(run_with(file))):
        with pytest.raises(UserError, match=r"mine\.csv.*[Nn]o such file"):
            refused()
