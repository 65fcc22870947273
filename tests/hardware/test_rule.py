"""A typo in `cluster.gpu` is a typo for every command, and is said together with whatever else is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fivefold import Run
from fivefold.cli import commands
from fivefold.config.template import template
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name
from fivefold.hardware.entry import write_entry
from fivefold.plan.planned import plan
from fivefold.train.start import train

RUN_FILE = """\
name: a
steps: 10
cluster: {gpus: 2}
model: {preset: tiny-llama, vocab: 1000}
data: {train: [{path: data/a}], seq_len: 64}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with run.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    return tmp_path


def call(command: str, *words: str) -> Result:
    return CliRunner().invoke(commands, [*command.split(), *words], prog_name="fivefold")


@pytest.mark.parametrize(
    "command", ["check run.yaml", "plan run.yaml", "plan run.yaml --ranks", "plan run.yaml --search", "train run.yaml"]
)
def test_an_unknown_name_is_refused_by_every_command(command: str, folder: Path) -> None:
    found = call(command, "--gpu", "h10o")
    assert found.exit_code == 2
    assert "cluster.gpu = h10o: there is no such accelerator in the catalogue; did you mean H100-" in found.stderr
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize("command", ["check run.yaml", "plan run.yaml", "train run.yaml"])
def test_it_is_said_with_whatever_else_is_wrong(command: str) -> None:
    said = call(command, "--gpu", "h10o", "--parallel.tp", "3", "--optim.lr", "-1").stderr
    assert "there is no such accelerator" in said
    assert "parallel.tp = 3" in said or "tp 3" in said
    assert "optim.lr = -1" in said


def test_so_is_it_from_python() -> None:
    run = Run.load("run.yaml", ["--gpu", "h10o"])
    for entry in (plan, train):
        with pytest.raises(UserError, match="did you mean H100-"):
            entry(run)


def test_a_file_is_read_and_checked(folder: Path) -> None:
    assert "gone.yaml" in call("check run.yaml", "--gpu", "gone.yaml").stderr
    (folder / "mine.yaml").write_text("name: mine\nmemory_gb: 80\nbandwith_tb_s: 3\n")
    found = call("check run.yaml", "--gpu", "mine.yaml")
    assert found.exit_code == 2
    assert "bandwith_tb_s: there is no such key; did you mean bandwidth_tb_s?" in found.stderr
    write_entry(folder / "mine.yaml", by_name("h200"))
    assert call("check run.yaml", "--gpu", "mine.yaml").exit_code == 0


@pytest.mark.parametrize("name", ["auto", "h100", "H100 SXM 80GB"])
def test_names_of_the_catalogue_are_taken_however_they_are_written(name: str) -> None:
    assert call("check run.yaml", "--gpu", name).exit_code == 0


def test_the_file_that_init_writes_is_taken(folder: Path) -> None:
    (folder / "run.yaml").write_text(template())
    assert call("check run.yaml").exit_code == 0
