"""A save that fails: training goes on, the older checkpoints stay, nothing is left over, and an event says why."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.errors import UserError
from tests.checkpoint.crew import Crew, Team
from tests.checkpoint.disk import Disk
from tests.checkpoint.example import FEW, SHAPES, Events, assert_holds, names_in, sharded, whole

MIB = 1 << 20


def fails_at(number: int, code: int):
    def act(count: int, name: str, arguments: tuple) -> None:
        if count == number:
            raise OSError(code, os.strerror(code))

    return act


def save(checkpointer: Checkpointer, step: int, names: Iterable[str] = SHAPES) -> None:
    checkpointer.save(step, whole(step, names), {"step": step})
    checkpointer.wait()


@pytest.mark.parametrize("again", [False, True], ids=["a new step", "a step saved again"])
def test_after_an_error_at_any_system_call_the_old_one_is_there_and_the_next_save_works(
    tmp_path: Path, again: bool
) -> None:
    step, number, failed = (2 if again else 3), 0, 0
    while True:
        number += 1
        code = errno.ENOSPC if number % 2 else errno.EIO
        run, events = tmp_path / str(number), Events()
        checkpointer = Checkpointer(run / "checkpoints", keep=2, on_event=events)
        save(checkpointer, 1, FEW)
        save(checkpointer, 2, FEW)
        with Disk(fails_at(number, code)) as disk:
            save(checkpointer, step, FEW)
        if disk.count < number:
            break
        if events.of("checkpoint_failed"):
            failed += 1
            assert os.strerror(code) in events.of("checkpoint_failed")[0]["reason"]
        else:
            assert len(events.of("checkpoint_saved")) == 3, f"call {number} failed and nobody was told"
        found = checkpointer.latest()
        assert_holds(found, found.step, FEW)
        assert found.step == step or (found.step == 2 and events.of("checkpoint_failed"))
        assert events.of("checkpoint_damaged") == []
        save(checkpointer, 4, FEW)
        assert_holds(checkpointer.latest(), 4, FEW)
        assert all(name.startswith("step-") for name in names_in(run / "checkpoints"))
        shutil.rmtree(run)
    assert failed >= 10, "most calls of a save come before the rename"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB: a tmpfs where we may mount one, else a folder whose writes fail beyond that."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode == 0:
        yield tmp_path
        subprocess.run(["umount", "-l", tmp_path], check=True)
    else:
        with Disk(lambda count, name, arguments: _refuse_beyond(tmp_path, 4 * MIB, name, arguments)):
            yield tmp_path


def _refuse_beyond(folder: Path, size: int, name: str, arguments: tuple) -> None:
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if name == "write" and used + len(arguments[1]) > size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_the_old_one_and_says_how_much_room_there_is(small_disk: Path) -> None:
    events = Events()
    checkpointer = Checkpointer(small_disk / "checkpoints", keep=3, on_event=events)
    save(checkpointer, 1)
    checkpointer.save(2, {"model.large": torch.zeros(6 * MIB, dtype=torch.uint8)}, {"step": 2})
    checkpointer.wait()
    (event,) = events.of("checkpoint_failed")
    assert "rank 0: No space left on device: " in event["reason"]
    assert "rank-00000.bin" in event["reason"]
    assert "GiB are free where" in event["reason"]
    assert event["message"].startswith("step-00000002 was not saved: ")
    assert names_in(small_disk / "checkpoints") == ["step-00000001"]
    assert_holds(checkpointer.latest(), 1)
    save(checkpointer, 3)
    assert_holds(checkpointer.latest(), 3)


def test_a_listener_that_fails_too_does_not_end_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def listener(kind: str, fields: dict) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=3, on_event=listener)
    save(checkpointer, 1)
    assert "saved step-00000001" in capsys.readouterr().err
    assert_holds(checkpointer.latest(), 1)


def test_a_state_that_json_cannot_hold_is_a_failed_save(tmp_path: Path) -> None:
    events = Events()
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=3, on_event=events)
    checkpointer.save(1, whole(1), {"step": object()})
    checkpointer.wait()
    assert checkpointer.saved is None
    assert "TypeError: Object of type object is not JSON serializable" in events.of("checkpoint_failed")[0]["reason"]


def test_a_folder_that_cannot_be_made_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot keep checkpoints in .*: Not a directory\. Make it writable"):
        Checkpointer(tmp_path / "file" / "checkpoints", keep=3, on_event=Events())


def fail_on_rank_one(team: Team, run: Path, how: str) -> tuple[list[str], int]:
    events = Events()
    checkpointer = Checkpointer(run / "checkpoints", keep=3, on_event=events, group=team.group)
    checkpointer.save(1, sharded(team, "dp3", 1), {"step": 1})
    checkpointer.wait()
    tensors = sharded(team, "dp3", 2)
    if team.rank == 1 and how == "copy":
        tensors["model.three"] = None
    with Disk(lambda count, name, arguments: _refuse_writes(team.rank == 1 and how == "write", name)):
        checkpointer.save(2, tensors, {"step": 2})
        checkpointer.wait()
    assert checkpointer.saved == 1
    after_failure = checkpointer.latest().step
    checkpointer.save(3, sharded(team, "dp3", 3), {"step": 3})
    checkpointer.wait()
    assert checkpointer.saved == 3
    assert_holds(checkpointer.latest(), 3)
    return [fields["reason"] for fields in events.of("checkpoint_failed")], after_failure


def _refuse_writes(refuse: bool, name: str) -> None:
    if refuse and name == "write":
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("how", ["write", "copy"])
def test_one_rank_that_fails_is_named_and_holds_up_nobody(crew: Crew, tmp_path: Path, how: str) -> None:
    results = crew.run(fail_on_rank_one, tmp_path, how, ranks=3)
    assert [after_failure for _, after_failure in results] == [1, 1, 1]
    assert [len(reasons) for reasons, _ in results] == [1, 0, 0]
    assert results[0][0][0].startswith("rank 1: ")
