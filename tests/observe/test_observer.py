"""The fan-out: files, charts and console from one report; and what fails there never stops training."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from fivefold.config.run import Data, Log, Model, Run, Source
from fivefold.errors import RunError, UserError
from fivefold.observe import open_observer, read_events, read_metrics
from fivefold.observe.console import PlainConsole
from fivefold.observe.metrics import StepRecord
from fivefold.observe.observer import RunObserver, SilentObserver
from fivefold.observe.sinks import TensorBoard, WeightsAndBiases


def a_run(**log: object) -> Run:
    return Run(
        name="tiny",
        steps=30,
        model=Model(layers=1, hidden=8, heads=1, ffn=8),
        data=Data(train=[Source(path=Path("data/x"))]),
        log=Log(**({"tensorboard": False} | log)),
    )


def record(step: int) -> StepRecord:
    return {
        "step": step,
        "tokens": 2048 * step,
        "loss": 8.0 / step,
        "grad_norm": 1.5,
        "lr": 1e-3,
        "step_s": 0.1,
        "tok_per_s": 20480.0,
        "tok_per_s_gpu": 10240.0,
        "mfu": None,
        "mem_peak_gib": 0.5,
    }


def observer_of(run: Run, folder: Path, resume_step: int | None = None, stream: io.StringIO | None = None):
    return RunObserver(run, folder, resume_step, PlainConsole(run.total_steps, stream or io.StringIO(), interval_s=0))


def charts(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard would draw: name -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    return {name: [(point.step, point.value) for point in accumulator.Scalars(name)] for name in names}


def test_a_step_with_validation_is_one_line_of_metrics_and_two_on_the_console(tmp_path: Path) -> None:
    stream = io.StringIO()
    observer = observer_of(a_run(), tmp_path, stream=stream)
    observer.validation(0, {"stdlib": 8.3})
    observer.step(record(1))
    observer.validation(1, {"stdlib": 8.1})
    observer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 0, "val_loss/stdlib": 8.3},
        {**record(1), "val_loss/stdlib": 8.1},
    ]
    shown = stream.getvalue().splitlines()
    assert shown[0] == "step 0  validation: stdlib 8.3000"
    assert shown[1].startswith("step 1/30  loss 8.0000")
    assert shown[2] == "step 1  validation: stdlib 8.1000"


def test_an_event_goes_to_the_file_and_the_console(tmp_path: Path) -> None:
    stream = io.StringIO()
    observer = observer_of(a_run(), tmp_path, stream=stream)
    observer.event("checkpoint_saved", step=10)
    observer.event("resumed", step=10, message="resumed from step 10")
    observer.close()
    assert [event["kind"] for event in read_events(tmp_path / "events.jsonl")] == ["checkpoint_saved", "resumed"]
    assert stream.getvalue().splitlines() == ["checkpoint saved  step=10", "resumed from step 10"]


def test_every_step_is_in_the_metrics_and_every_tenth_in_the_charts(tmp_path: Path) -> None:
    stream = io.StringIO()
    observer = observer_of(a_run(every=10, tensorboard=True), tmp_path, stream=stream)
    for step in range(1, 31):
        observer.step(record(step))
    observer.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 31))
    assert [step for step, _ in charts(tmp_path / "tensorboard")["train/loss"]] == [1, 10, 20, 30]
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/30", "10/30", "20/30", "30/30"]


def test_tensorboard_has_each_step_once_after_a_crash_and_a_resume(tmp_path: Path) -> None:
    run = a_run(tensorboard=True)
    first = observer_of(run, tmp_path)
    first.validation(0, {"stdlib": 8.3})
    for step in range(1, 8):
        first.step(record(step))
    first.close()
    second = observer_of(run, tmp_path, resume_step=5)
    for step in range(6, 11):
        second.step(record(step))
    second.validation(10, {"stdlib": 4.0})
    second.close()
    drawn = charts(tmp_path / "tensorboard")
    assert [step for step, _ in drawn["train/loss"]] == list(range(1, 11))
    assert drawn["val_loss/stdlib"] == [(0, pytest.approx(8.3)), (10, pytest.approx(4.0))]
    assert "train/mfu" not in drawn, "a value that is not known is no point"


def test_a_chart_that_fails_is_turned_off_with_an_event_and_the_steps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    stream = io.StringIO()
    observer = observer_of(a_run(tensorboard=True), tmp_path, stream=stream)
    observer.step(record(1))
    monkeypatch.setattr(TensorBoard, "write", full)
    for step in (2, 3):
        observer.step(record(step))
    observer.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["kind"], event["sink"]) == ("sink_off", "tensorboard")
    assert "No space left on device" in event["reason"]
    assert stream.getvalue().count("tensorboard is off from here on") == 1
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_chart_that_cannot_be_opened_is_turned_off_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    observer = observer_of(a_run(tensorboard=True), tmp_path)
    observer.step(record(1))
    observer.close()
    assert read_events(tmp_path / "events.jsonl")[0]["kind"] == "sink_off"


def test_a_disk_that_refuses_metrics_is_reported_once_and_all_lines_are_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    real, full = os.pwrite, True

    def pwrite(*arguments: object) -> int:
        if full:
            raise OSError(28, "No space left on device")
        return real(*arguments)  # type: ignore[arg-type]

    stream = io.StringIO()
    observer = observer_of(a_run(), tmp_path, stream=stream)
    monkeypatch.setattr(os, "pwrite", pwrite)
    for step in (1, 2):
        observer.step(record(step))
    observer.sync()
    full = False
    observer.step(record(3))
    observer.close()
    assert stream.getvalue().count("metrics.jsonl: No space left on device; training goes on") == 1
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_terminal_that_was_closed_does_not_stop_training(tmp_path: Path) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    observer = observer_of(a_run(), tmp_path, stream=Closed())
    observer.step(record(1))
    observer.step(record(2))
    observer.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_folder_that_cannot_be_written_is_said_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(RunError, match=r"cannot write the run's files in .*runs/tiny"):
        observer_of(a_run(), tmp_path / "runs" / "tiny")


def test_other_ranks_report_nothing(tmp_path: Path) -> None:
    observer = open_observer(a_run(), tmp_path, None, rank=1)
    assert isinstance(observer, SilentObserver)
    observer.step(record(1))
    observer.validation(1, {"stdlib": 8.0})
    observer.event("started")
    observer.sync()
    observer.close()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_wandb_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("fivefold.observe.sinks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'fivefold\[wandb\]'"):
        open_observer(a_run(wandb="offline"), tmp_path, None, rank=0)


def test_wandb_offline_writes_its_files_and_a_resume_continues_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")  # the run file decides, also against the environment
    run = a_run(wandb="offline")
    first = observer_of(run, tmp_path)
    first.step(record(1))
    first.close()
    second = observer_of(run, tmp_path, resume_step=1)
    second.step(record(2))
    second.validation(2, {"stdlib": 4.0})
    second.close()
    assert read_events(tmp_path / "events.jsonl") == []
    written = sorted((tmp_path / "wandb").glob("**/run-*.wandb"))
    assert len({file.name for file in written}) == 1, "one id over both starts"
    histories = b"".join(file.read_bytes() for file in written)
    assert b"train/loss" in histories
    assert b"val_loss/stdlib" in histories


def test_a_run_that_starts_in_another_folder_is_another_wandb_run(tmp_path: Path) -> None:
    from fivefold.observe.sinks import wandb_id

    ids = set()
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        ids |= {wandb_id(folder), wandb_id(folder)}
    assert len(ids) == 2


def test_a_wandb_that_raises_is_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(WeightsAndBiases, "__init__", refuse)
    observer = observer_of(a_run(wandb="online"), tmp_path)
    observer.step(record(1))
    observer.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["sink"], event["reason"]) == ("wandb", "ConnectionError: no route to host")
