"""Who is a worker: torchrun's variables, a Slurm step's, and not a batch script's."""

import pytest

from fivefold.config.run import Parallel
from fivefold.errors import UserError
from fivefold.hardware.node import ranks_of_node
from fivefold.launch.environment import first_host, is_worker
from fivefold.launch.local import worker_environment
from fivefold.parallel import mesh

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


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
        ({"SLURM_TASKS_PER_NODE": "2(x4)", "SLURM_NTASKS_PER_NODE": "4"}, 2),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "3(x2),2"}, 8),  # not the same for each
        ({"SLURM_STEP_TASKS_PER_NODE": "5"}, 8),  # no part of the world
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS_PER_NODE": "4"}, 2),
        ({}, 8),
    ],
)
def test_the_launcher_says_how_many_ranks_a_node_has(said, ranks):
    environ = STEP | said
    assert is_worker("slurm", environ)
    assert ranks_of_node(8, environ) == ranks


def test_a_step_needs_no_number_of_the_jobs_tasks():
    environ = {name: value for name, value in STEP.items() if name != "SLURM_NTASKS"}
    assert is_worker("auto", environ)
    assert environ["WORLD_SIZE"] == "8"


@pytest.mark.parametrize("step", ["", "batch", "4294967291"])
def test_a_batch_script_is_no_worker_although_it_has_a_task_number(step):
    assert not is_worker("auto", {**STEP, "SLURM_STEP_ID": step})


def test_asking_for_a_launcher_that_is_not_there_names_the_missing_variables():
    with pytest.raises(UserError, match="RANK, WORLD_SIZE not set; start with torchrun"):
        is_worker("env", {})
    with pytest.raises(UserError, match="SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID not set; start with srun"):
        is_worker("slurm", {})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a1,b2", "a1"), ("node[003-008,11],x", "node003"), ("r[1-2]-n[04,07]", "r1-n04"), ("", "")],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(("platform", "loopback"), [("linux", "lo"), ("darwin", "lo0"), ("win32", None)])
def test_local_workers_meet_on_the_loopback_that_the_system_has(monkeypatch, tmp_path, platform, loopback):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert worker_environment(0, 1, tmp_path).get("GLOO_SOCKET_IFNAME") == loopback


def test_a_rank_takes_its_own_gpu_or_the_only_one_that_its_scheduler_shows_it(monkeypatch):
    """With one GPU bound to each task, task 3 asked for the fourth of one."""
    monkeypatch.delenv(mesh.RENDEZVOUS, raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert mesh.gpu_number(visible=8) == 3
    assert mesh.gpu_number(visible=1) == 0


def test_more_workers_than_gpus_are_refused_with_the_numbers(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match=r"rank 2 of this machine has no GPU: 2 can be seen; start 2 workers"):
        mesh.gpu_number(visible=2)
    monkeypatch.setenv(mesh.RENDEZVOUS, "a file of the local launcher, which binds no GPU")
    with pytest.raises(UserError, match="1 can be seen; start 1 workers"):
        mesh.gpu_number(visible=1)


def test_a_step_is_known_by_its_older_name_too():
    assert is_worker("auto", {("SLURM_STEPID" if name == "SLURM_STEP_ID" else name): v for name, v in STEP.items()})


def test_ranks_without_a_place_to_meet_are_told_what_is_missing(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    for name in (mesh.RENDEZVOUS, "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(UserError, match=r"RANK 1 and WORLD_SIZE 2 are set, but not MASTER_PORT, where the ranks meet"),
        mesh.connect(Parallel()),
    ):
        pass
