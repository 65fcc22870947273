"""What a user names for the output is refused before the work, in one line, if it cannot be written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from fivefold.cli import commands
from fivefold.errors import UserError
from fivefold.outputs import check_file, check_folder, write_file

PLAN = ("plan", "run.yaml", "--gpu", "h100", "--gpus", "8", "--model.vocab", "8192")
SCHEDULE = ("schedule", "1f1b", "--pp", "2", "--microbatches", "4")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a run file and a file where a folder belongs; no work may begin."""

    def begun(*_: object, **__: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CliRunner().invoke(commands, ["init"]).stdout)
    (tmp_path / "file").write_text("")
    for work in (
        "fivefold.plan.search.best.search",
        "fivefold.plan.planned.plan",
        "fivefold.plan.schedule.answer",
        "fivefold.hardware.bench.bench",
        "fivefold.observe.report.read_history",
        "fivefold.data.build.find_inputs",
    ):
        monkeypatch.setattr(work, begun)
    return tmp_path


@pytest.mark.parametrize("place", ["absent", "file", "/proc/1/absent"])
@pytest.mark.parametrize(
    "words",
    [
        (*PLAN, "--html", "{}/a.html"),
        (*PLAN, "--search", "--write", "{}/a.yaml"),
        (*SCHEDULE, "--html", "{}/a.html"),
        (*SCHEDULE, "--csv", "{}/a.csv"),
        ("bench", "--out", "{}/a.yaml"),
        ("report", "runs/a", "--html", "{}/a.html"),
    ],
    ids=" ".join,
)
def test_a_file_in_no_folder_is_refused_before_the_work(folder: Path, words: tuple[str, ...], place: str) -> None:
    """A search went on to its end, and then to a traceback."""
    result = CliRunner().invoke(commands, [word.format(place) for word in words])
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: cannot write {place}/a.")
    assert f"there is no folder {place}; make it" in line


def test_a_folder_below_a_file_is_refused_before_the_work(folder: Path) -> None:
    result = CliRunner().invoke(commands, ["data", "build", "x", "--out", "file/set", "--train-tokenizer", "300"])
    assert result.exit_code == 2
    assert result.stderr == f"Error: cannot write file/set: {folder / 'file'} is a file; name another folder\n"


def test_places_that_take_no_files_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    for check, name in ((check_file, "a.html"), (check_folder, "new/set"), (check_file, "/dev/null")):
        with pytest.raises(UserError, match=f"cannot write {name}: "):
            check(Path(name))


@pytest.mark.parametrize("check", [check_file, lambda file: write_file(file, "")])
def test_a_folder_is_no_file(folder: Path, check: Callable[[Path], None]) -> None:
    (folder / "there").mkdir()
    with pytest.raises(UserError, match="cannot write there: "):
        check(Path("there"))


def test_a_link_to_nowhere_names_where_it_leads(folder: Path) -> None:
    (folder / "link").symlink_to(folder / "gone" / "a.html")
    with pytest.raises(UserError, match=r"there is no folder .*/gone; make it"):
        check_file(Path("link"))


def test_what_can_be_written_is(folder: Path) -> None:
    for file in (Path("new.txt"), Path("file"), Path("/dev/null")):
        check_file(file)
        write_file(file, "text")
    check_file(None)
    check_folder(folder / "new" / "set")
    assert (folder / "new.txt").read_text() == (folder / "file").read_text() == "text"
    assert not Path("/dev/null").is_file()
