"""What a run with experts writes: the same loads however many ranks share the work, each step once, charts too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivefold.observe.lines import read_lines
from tests.observe.test_observer import charts
from tests.ranks import run_workers
from tests.train.conftest import Trainer, train_as_worker, trainer_in

STEPS = 7
MODEL = "{experts: 4, top_k: 2, ffn: 16, dense_layers: 1, scores: sigmoid, bias: true}"
FLAGS = {
    "--model.moe": MODEL,
    "--model.mtp": "1",
    "--loss.balance_global": "0.01",
    "--loss.router_z": "0.001",
    "--routing.capacity_factor": "1.0",
    "--steps": str(STEPS),
    "--precision.compute": "fp64",
    "--validate.every": "null",
    "--log": "{every: 3, tensorboard: true}",
}
SAME = ("moe_load_max", "moe_load_mean", "moe_entropy", "moe_dropped", "balance_loss", "z_loss", "mtp_loss/1", "loss")
TIMED = {"moe_exchange_s", "update_s"}  # of the step before, which the first step of a start has not


def work(trainer: Trainer, name: str, world: int, *flags: str, stop_after: int | None = None) -> list[dict]:
    """The lines of a run's metrics, after so many ranks have trained it."""
    words = [*(word for each in FLAGS.items() for word in each), "--name", name, *flags]
    run_workers(world, trainer.file.parent, train_as_worker, trainer.file, words, stop_after)
    return trainer.metrics(name)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Two runs: `alone`, and `pair`, which shares the experts out, was stopped after 4 steps and went on."""
    trainer = trainer_in(tmp_path_factory.mktemp("experts"))
    work(trainer, "alone", 1, "--checkpoint.every", "never")
    pair = ("--parallel.ep", "2", "--checkpoint.every", "2")
    work(trainer, "pair", 2, *pair, stop_after=4)
    later = trainer.out / "pair" / "experts.jsonl"
    later.write_text(later.read_text() + json.dumps({"step": 6, "counts": {"1": [9, 9, 9, 9]}}) + "\n")
    work(trainer, "pair", 2, *pair)
    return trainer


def experts(trainer: Trainer, name: str) -> list[dict]:
    """The lines of a run's experts.jsonl."""
    return list(read_lines(trainer.out / name / "experts.jsonl"))


def test_two_ranks_that_share_the_experts_report_what_one_reports(trainer: Trainer) -> None:
    alone, pair = trainer.metrics("alone"), trainer.metrics("pair")
    assert len(alone) == len(pair) == STEPS
    for ours, theirs in zip(pair, alone, strict=True):
        assert {key: ours[key] for key in SAME} == pytest.approx({key: theirs[key] for key in SAME}, rel=1e-9)
        assert ours.keys() - TIMED == theirs.keys() - TIMED
    assert all(line["moe_load_max"] >= line["moe_load_mean"] > 1 for line in alone)
    assert all(0 < line["moe_dropped"] < 1 for line in alone)


def test_the_loads_are_in_their_file_once_a_step_that_is_due_also_after_a_resume(trainer: Trainer) -> None:
    alone = experts(trainer, "alone")
    assert [line["step"] for line in alone] == [1, 3, 6, 7]
    assert experts(trainer, "pair") == alone
    choices = 8 * 32 * 2
    for line in alone:
        assert list(line["counts"]) == ["1", "2"], "a layer with experts, and the block that predicts one token more"
        assert all(len(row) == 4 and all(type(each) is int for each in row) for row in line["counts"].values())
        assert sum(line["counts"]["1"]) == choices
        assert 0 < sum(line["counts"]["2"]) <= choices
    record = trainer.metrics("alone")[0]
    loads = [max(row) / (sum(row) / 4) for row in alone[0]["counts"].values()]
    assert record["moe_load_max"] == pytest.approx(max(loads))
    assert record["moe_load_mean"] == pytest.approx(sum(loads) / 2)


def test_time_in_exchanges_is_told_where_there_are_some_from_the_second_step_of_a_start_on(trainer: Trainer) -> None:
    assert not any("moe_exchange_s" in line for line in trainer.metrics("alone"))
    pair = trainer.metrics("pair")
    for key in TIMED:
        assert [line["step"] for line in pair if key not in line] == [1, 5]
    assert all(line["moe_exchange_s"] > 0 for line in pair if line["step"] not in (1, 5))


def test_charts_have_the_figures_of_experts(trainer: Trainer) -> None:
    drawn = charts(trainer.out / "alone" / "tensorboard")
    lines = trainer.metrics("alone")
    for key, name in (("moe_load_max", "train/moe_load_max"), ("mtp_loss/1", "mtp_loss/1")):
        assert drawn[name] == [(step, pytest.approx(lines[step - 1][key])) for step in (1, 3, 6, 7)]


def test_a_run_without_experts_has_no_file_of_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dense = trainer_in(tmp_path, capfd)
    dense.train("--steps", "1", "--validate.every", "null", "--checkpoint.every", "never")
    assert not (dense.out / "small" / "experts.jsonl").exists()
    assert not any("moe" in key for key in dense.metrics()[-1])
