"""The ways to start several workers: our own launcher, torchrun, and Slurm's srun by its environment."""

import os
import socket
import subprocess
import sys

import pytest

from fivefold import Run
from fivefold.config.run import Cluster
from fivefold.errors import UserError
from fivefold.train.options import TrainOptions
from fivefold.train.start import start_training, train
from tests.train.conftest import trainer  # noqa: F401 the fixture
from tests.train.test_kill_and_resume import computed

FLAGS = ("--steps", "3", "--precision.compute", "fp64")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_torchrun_and_srun_train_the_same_run_as_our_own_launcher(trainer):  # noqa: F811
    trainer.run(*FLAGS, "--name", "local", "--nproc", "2")

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", "2"]
    torchrun += ["--master_port", str(free_port()), "-m", "fivefold", "train", str(trainer.file), *FLAGS]
    subprocess.run([*torchrun, "--name", "torchrun"], check=True)

    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(free_port())}
    step |= {"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "fivefold", "train", str(trainer.file), *FLAGS, "--name", "srun"]
    tasks = [
        subprocess.Popen(command, env={**os.environ, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        for rank in ("0", "1")
    ]
    assert [task.wait() for task in tasks] == [0, 0]

    assert computed(trainer.metrics("torchrun")) == computed(trainer.metrics("local"))
    assert computed(trainer.metrics("srun")) == computed(trainer.metrics("local"))


def test_bad_input_is_said_once_before_any_worker_starts(trainer):  # noqa: F811
    output = trainer.run("--batch.global_size", "7", "--optim.lr", "-1", "--nproc", "2", code=2)
    assert output.count("optim.lr") == 1
    assert "global_size" in output
    assert not trainer.out.exists()


def test_a_layout_that_does_not_fill_the_workers_is_said_with_all_else_that_is_wrong(trainer):  # noqa: F811
    with pytest.raises(UserError) as caught:
        start_training(trainer.file, ["--parallel.tp", "3", "--optim.lr", "-1"], TrainOptions(nproc=4))
    for part in (str(trainer.file), "tp 3 = 3 does not divide the 4 ranks", "model.heads = 4 cannot", "optim.lr = -1"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "micro_size", "says"),
    [
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1\n", "4", "1B1 is missing"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n", "2", "it has 2 microbatches, but .* = 4"),
    ],
)
def test_a_schedule_that_cannot_run_is_said_before_any_worker_starts(
    trainer,  # noqa: F811
    monkeypatch,
    text,
    micro_size,
    says,
):
    monkeypatch.setattr("fivefold.train.start.run_workers", lambda words, count: pytest.fail("workers were started"))
    file = trainer.file.parent / "mine.csv"
    file.write_text(text)
    flags = ["--parallel.pp", "2", "--parallel.schedule", str(file), "--batch.micro_size", micro_size]
    with pytest.raises(UserError, match=says):
        start_training(trainer.file, flags, TrainOptions(nproc=2))
    assert not trainer.out.exists()


def test_the_layout_must_fill_the_workers_that_are_asked_for_and_not_those_that_the_file_plans_with(
    trainer,  # noqa: F811
    monkeypatch,
):
    started = []
    monkeypatch.setattr("fivefold.train.start.run_workers", lambda words, count: started.append(count) or 0)
    sizes = ["--batch.global_size", "12", "--batch.micro_size", "4", "--gpus", "8"]
    assert start_training(trainer.file, sizes, TrainOptions(nproc=3)) == 0
    assert started == [3]
    with pytest.raises(UserError, match="micro_size 4 x dp 8"):
        start_training(trainer.file, sizes, TrainOptions())


def test_a_worker_in_python_counts_the_workers_that_there_are_too(trainer, monkeypatch):  # noqa: F811
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    flags = ["--batch.global_size", "12", "--batch.micro_size", "4", "--gpus", "3"]
    run = Run.load(trainer.file, flags).model_copy(update={"cluster": Cluster(gpus=8)})
    assert train(run, launcher="env", stop_after=1) == trainer.out / "small"
    assert trainer.metrics()[-1]["step"] == 1


def test_an_input_that_only_the_workers_can_judge_is_said_once_too(trainer):  # noqa: F811
    output = trainer.run("--model.vocab", "50", "--nproc", "2", code=2)
    assert output.count("vocabulary") == 1
    assert "Traceback" not in output
    assert not trainer.out.exists()
