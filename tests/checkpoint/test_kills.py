"""Killed at any moment of a save, a run finds a whole checkpoint again, and nothing half-written is ever visible."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.find import looks_whole, open_checkpoint
from tests.checkpoint.crew import context
from tests.checkpoint.disk import Disk
from tests.checkpoint.example import FEW, Events, assert_holds, assert_same, blank, names_in, whole


def save(run: Path, step: int, keep: int = 2) -> Checkpointer:
    checkpointer = Checkpointer(run / "checkpoints", keep=keep, on_event=Events())
    checkpointer.save(step, whole(step, FEW), {"step": step})
    checkpointer.wait()
    return checkpointer


def save_and_die(run: Path, step: int, keep: int, last_call: int, how: str) -> None:
    """In a child: save, and end without a trace before the system call of this number; code 0: there was none."""

    def act(count: int, name: str, arguments: tuple) -> None:
        if count < last_call:
            return
        if how == "within a write" and name == "write":
            disk.write_half(*arguments)
        if how == "by a power cut":
            disk.lose_unsynced()
        os._exit(9)

    checkpointer = Checkpointer(run / "checkpoints", keep=keep, on_event=Events())
    with Disk(act) as disk:
        checkpointer.save(step, whole(step, FEW), {"step": step})
        checkpointer.wait()
    os._exit(0)


@pytest.mark.parametrize("how", ["within a write", "by a power cut"])
@pytest.mark.parametrize(("step", "keep"), [(3, 2), (2, 1)], ids=["a new step", "the only one saved again"])
def test_a_save_killed_at_any_system_call(tmp_path: Path, step: int, keep: int, how: str) -> None:
    before = tmp_path / "before"
    save(before, 1, keep)
    save(before, 2, keep)
    last_call, kept_old = 0, 0
    while True:
        last_call += 1
        run = tmp_path / str(last_call)
        shutil.copytree(before, run)
        child = context.Process(target=save_and_die, args=(run, step, keep, last_call, how))
        child.start()
        child.join()
        if child.exitcode == 0:
            break
        assert child.exitcode == 9
        for name in names_in(run / "checkpoints"):
            assert not name.startswith("step-") or looks_whole(run / "checkpoints" / name), f"{name} after {last_call}"
        events = Events()
        found = open_checkpoint(run, on_event=events)
        assert events == []
        assert_holds(found, found.step, FEW)
        assert found.step in (2, step)
        kept_old += found.step == 2
        restarted = Checkpointer(run / "checkpoints", keep=keep, on_event=events)
        assert restarted.latest().step == found.step
        resumed = save(run, 4)
        assert_holds(resumed.latest(), 4, FEW)
        assert all(name.startswith("step-") for name in names_in(run / "checkpoints"))
        shutil.rmtree(run)
    assert last_call > 20
    assert kept_old > 10


def train_until_killed(rank: int, run: Path, store: str, started: object) -> None:
    """In a child: resume, then save every step; values are a function of the step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    checkpointer = Checkpointer(run / "checkpoints", keep=2, on_event=Events())
    found = checkpointer.latest()
    step = found.step if found else 0
    if found:
        tensors = blank(whole(step, FEW))
        checkpointer.load(found, tensors)
        assert_same(tensors, whole(step, FEW))
    started.set()
    while True:
        step += 1
        checkpointer.save(step, whole(step, FEW), {"step": step})


def test_thirty_random_kills_of_two_workers(tmp_path: Path) -> None:
    chance, newest = random.Random(0), 0
    for attempt in range(30):
        started = context.Event()
        store = str(tmp_path / f"store{attempt}")
        workers = [context.Process(target=train_until_killed, args=(r, tmp_path, store, started)) for r in range(2)]
        for worker in workers:
            worker.start()
        assert started.wait(30), f"attempt {attempt} did not come back"
        time.sleep(chance.uniform(0.0, 0.2))
        for worker in chance.sample(workers, 2):
            os.kill(worker.pid, signal.SIGKILL)
            time.sleep(chance.choice([0.0, 0.05]))
        for worker in workers:
            worker.join()
        if names_in(tmp_path / "checkpoints") or newest:
            events = Events()
            found = open_checkpoint(tmp_path, on_event=events)
            assert events == []
            assert found.step >= newest, "a kill lost a step that was on disk"
            assert_holds(found, found.step, FEW)
            newest = found.step
    assert newest > 10
