"""`fivefold train` with a pipeline: the losses of one process, other layouts and files to go on with, a worker killed.

The embedding is tied, so that its copy has to follow whatever is loaded.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from fivefold.cli import commands
from fivefold.errors import UserError
from fivefold.pipeline.measured import PIPELINE_FILE, Measured
from fivefold.pipeline.named import make_schedule
from fivefold.pipeline.text import to_csv
from fivefold.train.options import TrainOptions
from fivefold.train.start import start_training
from tests.ranks import run_workers
from tests.train.conftest import train_as_worker, trainer_in
from tests.train.test_kill_and_resume import computed, wait_for_step, worker_ids
from tests.train.test_layouts import assert_same_figures

STOP, STEPS = 20, 30
COMMON = f"--model.layers 4 --model.tied true --steps {STEPS} --validate.every 10"
FOLDED = "--parallel.pp 2 --parallel.schedule zb-v --parallel.chunks 2"
FLAT = "--parallel.pp 2 --parallel.schedule 1f1b --batch.micro_size 1"


class Runs:
    """A folded pipeline that stopped after 20 of 30 steps, and one process that did not."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer = trainer_in(folder)
        self.whole = self.work("whole", 1, "--checkpoint.every never")
        self.stopped = self.work("stopped", 2, f"{FOLDED} --checkpoint.every {STOP}", stop_after=STOP)

    def work(self, name: str, world: int, flags: str, stop_after: int | None = None) -> list[dict]:
        """The lines of a run, in processes that have torch already."""
        words = f"--name {name} {COMMON} {flags}".split()
        run_workers(world, self.folder, train_as_worker, self.trainer.file, words, stop_after)
        return self.trainer.metrics(name)

    def resumed(self, name: str, world: int, flags: str) -> list[dict]:
        """The lines of a copy of the run that had stopped, to the end."""
        shutil.copytree(self.trainer.out / "stopped", self.trainer.out / name)
        return self.work(name, world, f"--checkpoint.every never {flags}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All runs."""
    return Runs(tmp_path_factory.mktemp("pipelines"))


@pytest.fixture(scope="module")
def unbroken(runs: Runs) -> list[dict]:
    """The lines of a folded pipeline that never stopped."""
    return runs.work("unbroken", 2, f"{FOLDED} --checkpoint.every never")


def test_a_folded_pipeline_has_the_losses_and_the_tokens_of_one_process(runs: Runs, unbroken: list[dict]) -> None:
    assert_same_figures(unbroken, runs.whole)
    assert [line.get("tokens") for line in unbroken] == [line.get("tokens") for line in runs.whole]


def test_it_goes_on_in_one_process_and_in_other_pipelines(runs: Runs) -> None:
    assert_same_figures(runs.resumed("alone", 1, ""), runs.whole)
    assert_same_figures(runs.resumed("flat", 2, FLAT), runs.whole)


def test_it_goes_on_with_a_schedule_from_a_file(runs: Runs) -> None:
    file = runs.folder / "mine.csv"
    file.write_text(to_csv(make_schedule("interleaved", 2, 4, 2)))
    flags = f"--parallel.pp 2 --parallel.chunks 2 --parallel.schedule {file}"
    assert_same_figures(runs.resumed("filed", 2, flags), runs.whole)
    assert Measured.load(runs.trainer.out / "filed" / PIPELINE_FILE).schedule_name == "mine.csv"


def test_its_times_are_measured_and_feed_a_new_schedule(runs: Runs) -> None:
    folder = runs.trainer.out / "stopped"
    measured = Measured.load(folder / PIPELINE_FILE)
    assert (measured.step, measured.schedule_name, measured.tokens) == (3, "zb-v", 2 * 32)
    words = ("schedule", "auto", "--pp", "2", "--chunks", "2", "--microbatches", "8", "--times", str(folder), "--json")
    result = CliRunner().invoke(commands, words)
    assert (result.exit_code, result.stderr) == (0, "")
    total = sum(map(sum, (measured.times().forward, measured.times().input, measured.times().weight)))
    assert json.loads(result.stdout)["makespan"] >= 8 * total / 2


def test_a_file_that_cannot_run_is_refused_before_anything_starts_and_its_action_named(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = runs.folder / "broken.csv"
    file.write_text(to_csv(make_schedule("zb-v", 2, 4, 2)).replace(",1W2", ""))
    flags = f"--name broken {COMMON} --parallel.pp 2 --parallel.chunks 2 --parallel.schedule {file}".split()
    output = runs.trainer.run("--nproc", "2", *flags, code=2)
    assert "1W2" in output
    assert "Traceback" not in output
    assert not (runs.trainer.out / "broken").exists()
    monkeypatch.setattr("fivefold.train.start.run_workers", lambda *_: pytest.fail("workers were started"))
    with pytest.raises(UserError, match="1W2"):
        start_training(runs.trainer.file, flags, TrainOptions(nproc=2))


def test_a_worker_that_is_killed_is_named_and_the_run_goes_on_to_the_last_bit(runs: Runs, unbroken: list[dict]) -> None:
    flags = f"--name killed {COMMON} {FOLDED} --checkpoint.every 10"
    process = runs.trainer.start("--nproc", "2", *flags.split())
    wait_for_step(runs.trainer, process, "killed", 12)
    os.kill(max(worker_ids(runs.trainer, "killed")), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was killed by SIGKILL" in output
    assert len(runs.trainer.metrics("killed")) <= STEPS
    assert computed(runs.work("killed", 2, f"{FOLDED} --checkpoint.every 10")) == computed(unbroken)
