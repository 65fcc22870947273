"""A run that is killed and resumed writes the same numbers as one that was not, to the last bit."""

import os
import signal
import time
from pathlib import Path

import pytest

from fivefold.observe.metrics import read_metrics

COMPUTED = ("step", "tokens", "loss", "grad_norm", "lr", "val_loss/held")


def computed(lines):
    """What a line says of the computation, not of the clock."""
    return [{key: line[key] for key in COMPUTED if key in line} for line in lines]


def steps_written(trainer, name):
    file = trainer.out / name / "metrics.jsonl"
    return len(read_metrics(file)) if file.exists() else 0


def wait_for_step(trainer, process, name, step):
    while steps_written(trainer, name) <= step:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.005)


def kill_at(trainer, process, name, step):
    """SIGKILL to the command and all its workers once a line of `step` is there."""
    wait_for_step(trainer, process, name, step)
    os.killpg(process.pid, signal.SIGKILL)
    for worker in worker_ids(trainer, name):
        os.kill(worker, signal.SIGKILL)
    process.wait()


def worker_ids(trainer, name):
    """The processes that still train this run: the kernel must have ended them with their parent."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().decode().split("\0")
        except OSError:
            continue
        if str(trainer.file) in command and name in command and "--launcher" in command:
            found.append(int(file.parent.name))
    return found


@pytest.mark.parametrize(("workers", "compute"), [(1, "fp32"), (2, "bf16")])
def test_a_run_killed_and_resumed_three_times_writes_the_losses_of_an_unbroken_one(trainer, workers, compute):
    flags = ("--nproc", str(workers), "--precision.compute", compute)
    trainer.run(*flags, "--name", "whole")
    whole = computed(trainer.metrics("whole"))
    assert [line["step"] for line in whole] == list(range(61))
    assert whole[60]["loss"] < 0.8 * whole[1]["loss"]

    for step in (33, 44, 57):
        kill_at(trainer, trainer.start(*flags, "--name", "killed"), "killed", step)
    assert "resumed from" in trainer.run(*flags, "--name", "killed", "--resume", "must")
    assert computed(trainer.metrics("killed")) == whole


def test_one_worker_killed_ends_the_run_and_is_named(trainer):
    process = trainer.start("--nproc", "2", "--name", "hurt")
    wait_for_step(trainer, process, "hurt", 3)
    victim = max(worker_ids(trainer, "hurt"))
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was killed by SIGKILL" in output
    assert worker_ids(trainer, "hurt") == []


def test_a_run_stopped_by_sigterm_saves_and_goes_on_where_it_was(trainer):
    process = trainer.start("--name", "stopped", "--nproc", "1")
    wait_for_step(trainer, process, "stopped", 14)
    process.terminate()
    output, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "stopped after SIGTERM at step" in output
    at = trainer.metrics("stopped")[-1]["step"]
    assert trainer.checkpoint(at, "stopped").is_dir()
    assert f"at step {at}" in trainer.train("--name", "stopped")
    trainer.train("--name", "whole")
    assert computed(trainer.metrics("stopped")) == computed(trainer.metrics("whole"))
