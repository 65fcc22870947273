"""Who is a worker: torchrun's variables, a Slurm step's, and not a batch script's."""

import pytest

from fivefold.errors import UserError
from fivefold.launch.environment import first_host, is_worker

STEP = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "31234",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
}


def test_a_plain_shell_is_no_worker():
    assert not is_worker("auto", {})


def test_torchruns_variables_make_a_worker():
    assert is_worker("auto", {"RANK": "1", "WORLD_SIZE": "2"})


def test_local_starts_workers_even_under_torchrun():
    assert not is_worker("local", {"RANK": "1", "WORLD_SIZE": "2"})


def test_a_slurm_step_is_a_worker_and_gets_torchs_variables():
    environ = dict(STEP)
    assert is_worker("auto", environ)
    assert {name: environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "31234",
    }


@pytest.mark.parametrize("step", ["", "batch", "4294967291"])
def test_a_batch_script_is_no_worker_although_it_has_a_task_number(step):
    assert not is_worker("auto", {**STEP, "SLURM_STEP_ID": step})


def test_asking_for_a_launcher_that_is_not_there_names_the_missing_variables():
    with pytest.raises(UserError, match="RANK, WORLD_SIZE not set; start with torchrun"):
        is_worker("env", {})
    with pytest.raises(UserError, match="SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID not set; start with srun"):
        is_worker("slurm", {})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a1,b2", "a1"), ("node[003-008,11],x", "node003"), ("r[1-2]-n[04,07]", "r1-n04"), ("", "")],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first
