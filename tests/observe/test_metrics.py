"""metrics.jsonl: a line a step, once, whatever crashed in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.observe.metrics import MetricsFile, read_metrics


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def write_steps(path: Path, first: int, last: int, resume_step: int | None = None) -> None:
    file = MetricsFile(path, resume_step)
    for step in range(first, last + 1):
        file.write(step, {"step": step, "loss": 1 / step})
    file.close()


def test_a_resume_drops_the_steps_that_will_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 17)
    write_steps(path, 11, 30, resume_step=10)
    assert steps(path) == list(range(1, 31))


def test_three_crashes_leave_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 13)
    write_steps(path, 11, 12, resume_step=10)
    write_steps(path, 11, 25, resume_step=10)
    write_steps(path, 21, 30, resume_step=20)
    unbroken = tmp_path / "unbroken.jsonl"
    write_steps(unbroken, 1, 30)
    assert path.read_bytes() == unbroken.read_bytes()


def test_a_start_from_nothing_drops_all_lines_of_an_attempt_without_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 0 + 1, 5)
    MetricsFile(path, None).close()
    assert path.read_text() == ""


def test_a_resume_from_step_0_keeps_the_validation_before_training(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(0, {"val_loss/stdlib": 8.3})
    file.write(1, {"loss": 8.2})
    file.close()
    MetricsFile(path, 0).close()
    assert read_metrics(path) == [{"step": 0, "val_loss/stdlib": 8.3}]


def test_validation_joins_the_line_of_its_step_in_either_order(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(1, {"loss": 4.0})
    file.write(1, {"val_loss/a": 4.5, "val_loss/b": 4.6})
    file.write(2, {"val_loss/a": 3.5})
    file.write(2, {"loss": 3.0})
    file.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 4.0, "val_loss/a": 4.5, "val_loss/b": 4.6},
        {"step": 2, "val_loss/a": 3.5, "loss": 3.0},
    ]


def test_a_value_that_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(0, {"val_loss/a": 8.3})
    file.close()
    file = MetricsFile(path, resume_step=0)
    file.write(0, {"val_loss/a": 8.3})
    file.close()
    assert path.read_text() == '{"step": 0, "val_loss/a": 8.3}\n'


def test_steps_that_go_back_are_refused(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(5, {"loss": 1.0})
    with pytest.raises(ValueError, match="step 4 after those of step 5"):
        file.write(4, {"loss": 1.0})
    file.close()


KILLED = """
import os, signal, sys
from fivefold.observe.metrics import MetricsFile
file = MetricsFile(sys.argv[1])
for step in range(1, 8):
    file.write(step, {"loss": 1 / step})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_has_lost_no_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert steps(path) == list(range(1, 8))
