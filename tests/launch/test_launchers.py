"""The ways to start several workers: our own launcher, torchrun, and Slurm's srun by its environment."""

import os
import socket
import subprocess
import sys

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


def test_an_input_that_only_the_workers_can_judge_is_said_once_too(trainer):  # noqa: F811
    output = trainer.run("--model.vocab", "50", "--nproc", "2", code=2)
    assert output.count("vocabulary") == 1
    assert "Traceback" not in output
    assert not trainer.out.exists()
