"""Training gives the same losses on any layout of four processes, and each goes on where another stopped."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from tests.ranks import run_workers
from tests.train.conftest import train_as_worker, trainer_in

LAYOUTS = {
    "tp4": "--parallel.tp 4 --batch.micro_size 8",
    "cp4 ring": "--parallel.cp 4 --batch.micro_size 8",
    "tp2 cp2 gather": "--parallel.tp 2 --parallel.cp 2 --parallel.cp_method gather --batch.micro_size 4",
    "tp2 dp2 zero3": "--parallel.tp 2 --parallel.zero 3 --batch.micro_size 4",
    "cp2 ulysses dp2": "--parallel.cp 2 --parallel.cp_method ulysses --batch.micro_size 2",
    "dp4 replicate2 zero2": "--parallel.replicate 2 --parallel.zero 2 --batch.micro_size 1",
    "dp4 zero0": "--parallel.zero 0 --batch.micro_size 2",
    "tp2 dp2 recompute": "--parallel.tp 2 --recompute.mode full --batch.micro_size 4",
    "pp2 zb-v dp2 zero3": (
        "--parallel.pp 2 --parallel.schedule zb-v --parallel.chunks 2 --parallel.zero 3 --batch.micro_size 1"
    ),
    "pp4 zb-h1": "--parallel.pp 4 --parallel.schedule zb-h1 --batch.micro_size 2",
    "pp2 tp2 interleaved": (
        "--parallel.pp 2 --parallel.tp 2 --parallel.schedule interleaved --parallel.chunks 2 --batch.micro_size 2"
    ),
}
BY_COMMAND = ("cp2 ulysses dp2", "pp2 zb-v dp2 zero3")
"""Those that the command starts, which costs as many imports of torch as there are processes."""
STOP, STEPS = 8, 12
COMMON = f"--model.kv_heads 4 --model.layers 4 --steps {STEPS} --validate.every 4"


class Runs:
    """One run a layout, stopped after 8 of 12 steps, and one in one process that was never stopped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trainer = trainer_in(folder)
        self.work(1, f"--name whole --batch.micro_size 8 --checkpoint.every never {COMMON}")
        self.whole = self.trainer.metrics("whole")

    def work(self, world: int, flags: str, stop_after: int | None = None) -> None:
        """Train in processes that have torch already."""
        run_workers(world, self.folder, train_as_worker, self.trainer.file, flags.split(), stop_after)

    def stopped(self, layout: str) -> Path:
        """The folder of a layout's run, which was made when it was first asked for."""
        name = layout.replace(" ", "-")
        if not (self.trainer.out / name).exists():
            flags = f"--name {name} {COMMON} --checkpoint.every {STOP} {LAYOUTS[layout]}"
            if layout in BY_COMMAND:
                self.trainer.run(*flags.split(), "--stop-after", str(STOP), "--nproc", "4")
            else:
                self.work(4, flags, STOP)
        return self.trainer.out / name

    def resumed(self, layout: str, world: int, flags: str) -> list[dict]:
        """The lines of a copy of a layout's run that went on, to its end, in another layout."""
        origin = self.stopped(layout)
        name = f"{origin.name}-on-{world}"
        shutil.copytree(origin, self.trainer.out / name)
        self.work(world, f"--name {name} --checkpoint.every never {COMMON} {flags}")
        return self.trainer.metrics(name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """All runs."""
    return Runs(tmp_path_factory.mktemp("layouts"))


def assert_same_figures(ours: list[dict], theirs: list[dict]) -> None:
    """Each step's line is there once, with the same loss, norm and validation loss."""
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for our, their in zip(ours, theirs, strict=True):
        assert our.keys() ^ their.keys() <= {"update_s"}  # a start does not know that of the step before its first
        for key in {"loss", "grad_norm", "val_loss/held"} & their.keys():
            assert our[key] == pytest.approx(their[key], rel=1e-5 if "loss" in key else 1e-4), (our["step"], key)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_gives_the_losses_of_one_process(runs, layout):
    assert_same_figures(runs.trainer.metrics(runs.stopped(layout).name), runs.whole[: STOP + 1])


@pytest.mark.parametrize("layout", ["tp2 cp2 gather", "tp2 dp2 zero3", "pp2 zb-v dp2 zero3"])
def test_what_was_saved_goes_on_in_one_process(runs, layout):
    assert_same_figures(runs.resumed(layout, 1, "--batch.micro_size 8"), runs.whole)


@pytest.mark.parametrize(("layout", "following"), list(pairwise([*LAYOUTS, next(iter(LAYOUTS))])))
def test_what_was_saved_goes_on_in_the_next_layout(runs, layout, following):
    assert_same_figures(runs.resumed(layout, 4, LAYOUTS[following]), runs.whole)
