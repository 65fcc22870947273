"""The parent of local workers: what it passes on, and that none of them outlives it."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fivefold.launch import local
from tests.train.conftest import trainer, write_tokens  # noqa: F401 the fixture
from tests.train.test_kill_and_resume import wait_for_step, worker_ids

WORKER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: open({log!r}, "a").write("asked "))
open({log!r}, "a").write("ready ")
for _ in range(400):
    time.sleep(0.05)
    if "asked" in open({log!r}).read():
        time.sleep({save_s})
        sys.exit(0)
"""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The workers that `run_workers` starts, each of which runs WORKER and writes into `log`."""
    workers = []
    log = tmp_path / "log"
    script = WORKER.format(log=str(log), save_s=0.3)

    def start(_, environ):
        workers.append(subprocess.Popen([sys.executable, "-c", script], env=environ, process_group=0))
        return workers[-1]

    monkeypatch.setattr(local, "_start", start)
    return workers, log


def test_a_parent_that_cannot_start_all_workers_leaves_none_behind(started, monkeypatch):
    """From Python the parent lives on, and so did the workers that were there already."""
    workers, _ = started
    start = local._start

    def second_fails(command, environ):
        if workers:
            raise OSError("no more processes")
        return start(command, environ)

    monkeypatch.setattr(local, "_start", second_fails)
    with pytest.raises(OSError, match="no more processes"):
        local.run_workers([], 2)
    assert workers[0].returncode == -signal.SIGKILL


def test_a_signal_that_comes_twice_is_passed_on_once(started, monkeypatch):
    workers, log = started
    first_failure = local._first_failure

    def signalled(running):
        while not log.exists() or "ready" not in log.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return first_failure(running)

    monkeypatch.setattr(local, "_first_failure", signalled)
    assert local.run_workers([], 1) == 128 + signal.SIGTERM
    assert log.read_text() == "ready asked "
    assert workers[0].returncode == 0


def test_workers_can_be_started_from_a_thread_that_may_not_catch_signals(started):
    _, log = started
    log.write_text("asked ")
    codes = []
    thread = threading.Thread(target=lambda: codes.append(local.run_workers([], 2)))
    thread.start()
    thread.join()
    assert codes == [0]


def test_a_signal_to_launcher_and_workers_alike_stops_the_run_with_a_checkpoint(trainer):  # noqa: F811
    """As Slurm and systemd send it; workers took the launcher's copy for a second wish and ended at once."""
    process = trainer.start("--nproc", "2", "--steps", "100000", "--name", "stopped")
    wait_for_step(trainer, process, "stopped", 3)
    for each in (*worker_ids(trainer, "stopped"), process.pid):
        os.kill(each, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert trainer.checkpoint(trainer.metrics("stopped")[-1]["step"], "stopped").is_dir()


def test_what_all_ranks_refuse_is_said_once(trainer):  # noqa: F811
    trainer.train("--steps", "4", stop_after=1)
    write_tokens(trainer.file.parent / "tokens", seed=1)
    output = trainer.run("--steps", "4", "--nproc", "2", code=2)
    assert output.count("is not what step-00000001 was trained on") == 1, output
    assert "Traceback" not in output


def test_what_the_main_rank_alone_meets_is_said_without_the_confusion_of_the_others(trainer):  # noqa: F811
    """The other ranks told at length of a connection that was closed."""
    trainer.train("--steps", "4", stop_after=1)
    file = trainer.out / "small" / "metrics.jsonl"
    file.unlink()
    file.mkdir()
    output = trainer.run("--steps", "4", "--nproc", "2", code=1)
    assert output.count("cannot write the run's files in") == 1
    assert "Traceback" not in output
