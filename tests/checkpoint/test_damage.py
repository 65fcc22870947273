"""Damage of every kind in every file is found by content, named, and passed over for the next older checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.manifest import DamageError, Manifest
from fivefold.errors import RunError, UserError
from tests.checkpoint.crew import Crew, Team
from tests.checkpoint.example import Events, assert_holds, assert_same, blank, sharded, whole

FILES = ["rank-00000.bin", "rank-00001.bin", "tensors.json", "manifest.json"]


def save_steps(team: Team, run: Path, steps: list[int]) -> None:
    checkpointer = Checkpointer(run / "checkpoints", keep=9, on_event=Events(), group=team.group)
    for step in steps:
        checkpointer.save(step, sharded(team, "dp2", step), {"step": step})
    checkpointer.close()


@pytest.fixture(scope="module")
def saved(crew: Crew, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 50 and 100, saved by two ranks. Tests work on copies."""
    run = tmp_path_factory.mktemp("saved")
    crew.run(save_steps, run, [50, 100], ranks=2)
    assert sorted(path.name for path in (run / "checkpoints/step-00000100").iterdir()) == sorted(FILES)
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def flip(file: Path, position: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def flip_first(file: Path) -> None:
    flip(file, 0)


def flip_middle(file: Path) -> None:
    flip(file, file.stat().st_size // 2, 7)


def flip_last(file: Path) -> None:
    flip(file, -1, 3)


def cut_one_byte(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def add_one_byte(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def remove(file: Path) -> None:
    file.unlink()


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def take_from_step_50(file: Path) -> None:
    older = file.parent.with_name("step-00000050") / file.name
    shutil.copy(older, file)


def swap_rank_files(file: Path) -> None:
    other = file.with_name("rank-00001.bin" if file.name == "rank-00000.bin" else "rank-00000.bin")
    ours = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(ours)


ANYWHERE = [flip_first, flip_middle, flip_last, cut_one_byte, add_one_byte, empty, remove, replace_by_folder]
CASES = [(damage, file) for damage in ANYWHERE for file in FILES]
CASES += [(take_from_step_50, file) for file in FILES if file != "tensors.json"]
CASES += [(swap_rank_files, "rank-00000.bin")]


@pytest.mark.parametrize(("damage", "file"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_damage_is_named_and_the_older_one_used(run: Path, damage: Callable[[Path], None], file: str) -> None:
    damage(run / "checkpoints/step-00000100" / file)
    events = Events()
    checkpointer = Checkpointer(run / "checkpoints", keep=9, on_event=events)
    found = checkpointer.latest()
    tensors = blank(whole(50))
    assert checkpointer.load(found, tensors) == {"step": 50}
    assert_same(tensors, whole(50))
    (event,) = events.of("checkpoint_damaged")
    assert (event["checkpoint"], event["file"], event["using"]) == ("step-00000100", file, "step-00000050")
    assert event["message"] == f"checkpoint step-00000100 is damaged: {file} {event['reason']}; using step-00000050"


def test_the_message_has_both_checksums(run: Path) -> None:
    flip_middle(run / "checkpoints/step-00000100/rank-00001.bin")
    events = Events()
    assert_holds(open_checkpoint(run, on_event=events), 50)
    manifest = json.loads((run / "checkpoints/step-00000100/manifest.json").read_text())
    (wanted,) = (file["xxh3"] for file in manifest["files"] if file["name"] == "rank-00001.bin")
    message = events[0][1]["message"]
    assert message.startswith("checkpoint step-00000100 is damaged: rank-00001.bin has checksum ")
    assert message.endswith(f"the manifest says {wanted}; using step-00000050")


def test_every_byte_of_the_manifest_counts(run: Path) -> None:
    folder = run / "checkpoints/step-00000100"
    good = (folder / "manifest.json").read_bytes()
    for position in range(len(good)):
        flip(folder / "manifest.json", position, bit=position % 8)
        with pytest.raises(DamageError):
            Manifest.read(folder)
        (folder / "manifest.json").write_bytes(good)
    assert Manifest.read(folder).step == 100


def test_a_manifest_cut_anywhere_is_damaged(run: Path) -> None:
    folder = run / "checkpoints/step-00000100"
    good = (folder / "manifest.json").read_bytes()
    for length in range(len(good)):
        (folder / "manifest.json").write_bytes(good[:length])
        with pytest.raises(DamageError):
            Manifest.read(folder)


@pytest.mark.parametrize("content", [b"[" * 100_000, b"null", b"{}", b'{"xxh3": 1}', bytes(range(256))])
def test_a_manifest_that_was_overwritten_is_damaged(run: Path, content: bytes) -> None:
    (run / "checkpoints/step-00000100/manifest.json").write_bytes(content)
    assert_holds(open_checkpoint(run, on_event=Events()), 50)


def test_a_whole_checkpoint_under_the_name_of_another_step_is_damaged(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/step-00000100")
    shutil.copytree(run / "checkpoints/step-00000050", run / "checkpoints/step-00000100")
    events = Events()
    assert_holds(open_checkpoint(run, on_event=events), 50)
    assert "manifest.json is of step 50, in a folder of another step" in events[0][1]["message"]


def test_a_format_from_the_future_is_not_called_damaged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.checkpoint.manifest.FORMAT", 0)
    with pytest.raises(UserError, match="has checkpoint format 1, this fivefold reads format 0: use the fivefold that"):
        open_checkpoint(run)


def test_when_all_are_damaged_nothing_starts_from_scratch_unasked(run: Path) -> None:
    for step in ("step-00000050", "step-00000100"):
        remove(run / "checkpoints" / step / "rank-00000.bin")
    checkpointer = Checkpointer(run / "checkpoints", keep=9, on_event=Events())
    with pytest.raises(RunError, match=r"none of the 2 (?s:.*)step-00000100: rank-00000\.bin is missing"):
        checkpointer.latest()


def test_a_damaged_step_that_was_asked_for_is_refused(run: Path) -> None:
    flip_first(run / "checkpoints/step-00000100/rank-00000.bin")
    with pytest.raises(UserError, match=r"checkpoint step-00000100 is damaged: rank-00000\.bin has checksum"):
        open_checkpoint(run, step=100)


def test_damage_between_check_and_load_stops_the_load(run: Path) -> None:
    checkpointer = Checkpointer(run / "checkpoints", keep=9, on_event=Events())
    found = checkpointer.latest()
    flip_first(run / "checkpoints/step-00000100/rank-00001.bin")
    with pytest.raises(RunError, match=r"changed on disk .*: rank-00001.bin has checksum"):
        checkpointer.load(found, blank(whole(100)))
    flip_first(run / "checkpoints/step-00000100/tensors.json")
    with pytest.raises(RunError, match=r"changed on disk .*: tensors.json has checksum"):
        checkpointer.load(found, blank(whole(100)))


def latest_of(team: Team, run: Path) -> tuple[int, list[str]]:
    events = Events()
    checkpointer = Checkpointer(run / "checkpoints", keep=9, on_event=events, group=team.group)
    return checkpointer.latest().step, [fields["message"] for _, fields in events]


@pytest.mark.parametrize("file", FILES)
def test_all_ranks_agree_though_one_sees_the_damage(crew: Crew, run: Path, file: str) -> None:
    flip_middle(run / "checkpoints/step-00000100" / file)
    results = crew.run(latest_of, run)
    assert [step for step, _ in results] == [50] * 4
    assert [len(messages) for _, messages in results] == [1, 0, 0, 0]
    assert file in results[0][1][0]


def load_error(team: Team, run: Path) -> str:
    checkpointer = Checkpointer(run / "checkpoints", keep=9, on_event=Events(), group=team.group)
    found = checkpointer.latest()
    tensors = blank(sharded(team, "dp2", 100))
    if team.rank == 0:
        flip_first(run / "checkpoints/step-00000100/rank-00001.bin")
    checkpointer._ranks.gather(None)
    try:
        checkpointer.load(found, tensors)
    except RunError as error:
        return str(error)
    return ""


def test_all_ranks_stop_though_one_reads_the_damage(crew: Crew, run: Path) -> None:
    first, second = crew.run(load_error, run, ranks=2)
    assert "rank-00001.bin has checksum" in first
    assert first == second
