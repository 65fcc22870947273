"""Resumes at the edges: before the first checkpoint, at step 0, at the end, under another schedule, after damage."""

import errno
import os

import pytest

from fivefold import Run
from fivefold.errors import RunError, UserError
from fivefold.optim.schedule import learning_rate
from fivefold.train.job import Job
from tests.checkpoint.test_failed_saves import small_disk  # noqa: F401 the fixture
from tests.train.test_kill_and_resume import computed
from tests.train.test_resume import files_of

QUIET = ("--validate.every", "null")
SHORT = (*QUIET, "--steps", "8", "--checkpoint.every", "2")
CONSTANT = ("--optim.decay", "constant", "--optim.warmup_fraction", "0")


@pytest.mark.parametrize(
    "change",
    [
        ("--optim.lr", "1e-4"),
        ("--optim.final_lr_fraction", "0.5"),
        ("--optim.decay", "linear"),
        ("--optim.decay", "wsd", "--optim.decay_steps", "3"),
        ("--optim.warmup_fraction", "0.8"),
        ("--steps", "10"),
        ("--steps", "6", "--optim.lr", "1e-2"),
    ],
    ids=" ".join,
)
def test_from_the_first_resumed_step_the_rate_is_that_of_the_new_run_file(trainer, change):
    trainer.train(*SHORT, stop_after=4)
    trainer.train(*SHORT, *change)
    before, after = Run.load(trainer.file, SHORT), Run.load(trainer.file, [*SHORT, *change])
    rates = [learning_rate(before.optim, step, before.total_steps) for step in range(1, 5)]
    rates += [learning_rate(after.optim, step, after.total_steps) for step in range(5, after.total_steps + 1)]
    assert [line["lr"] for line in trainer.metrics()] == rates
    resumed = next(event for event in trainer.events() if event["kind"] == "resumed")
    assert {each["key"] for each in resumed["changes"]} == {flag.removeprefix("--") for flag in change[::2]}


def test_more_steps_after_the_end_are_the_steps_of_an_unbroken_run(trainer):
    trainer.train(*SHORT, *CONSTANT, "--name", "whole")
    trainer.train(*SHORT, *CONSTANT, "--steps", "4")
    assert trainer.checkpoint(4).is_dir()
    trainer.train(*SHORT, *CONSTANT)
    assert computed(trainer.metrics()) == computed(trainer.metrics("whole"))


def test_fewer_steps_than_were_done_change_nothing(trainer):
    trainer.train(*SHORT, stop_after=4)
    before = files_of(trainer.out)
    assert "is finished: step-00000004 is step 4 of 3" in trainer.train(*SHORT, "--steps", "3")
    assert files_of(trainer.out) == before


def test_a_run_that_died_before_its_first_checkpoint_starts_anew_as_if_it_were_the_first_time(trainer, monkeypatch):
    trainer.train(*SHORT, "--name", "whole")
    with monkeypatch.context() as patch:
        dies_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(*SHORT)
    assert [line["step"] for line in trainer.metrics()] == [1]
    trainer.train(*SHORT)
    assert computed(trainer.metrics()) == computed(trainer.metrics("whole"))


def test_a_checkpoint_of_step_0_goes_on_as_the_run_that_it_is_the_start_of(trainer, monkeypatch):
    trainer.train("--steps", "8", "--name", "whole")
    validate = Job.validate
    with monkeypatch.context() as patch:
        patch.setattr(Job, "validate", lambda job: (validate(job), job.save()))
        dies_after(patch, 0)
        with pytest.raises(KeyboardInterrupt):
            trainer.train("--steps", "8")
    assert trainer.checkpoint(0).is_dir()
    assert "at step 0" in trainer.train("--steps", "8", resume="must")
    assert computed(trainer.metrics()) == computed(trainer.metrics("whole"))


def dies_after(patch, steps):
    """The next run is ended from outside within step `steps` + 1."""
    from fivefold.train import loop

    real, left = loop.train_step, [steps]

    def train_step(*args, **kwargs):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return real(*args, **kwargs)

    patch.setattr(loop, "train_step", train_step)


def lose_shard(checkpoint):
    (checkpoint / "rank-00000.bin").unlink()


def cut_shard(checkpoint):
    file = checkpoint / "rank-00000.bin"
    file.write_bytes(file.read_bytes()[:-1])


def lose_manifest(checkpoint):
    (checkpoint / "manifest.json").unlink()


def leave_unfinished(checkpoint):
    (checkpoint / "manifest.json").unlink()
    checkpoint.rename(checkpoint.with_name(f".saving-{checkpoint.name}"))


def test_a_save_cut_short_or_damaged_is_passed_over_and_the_run_goes_on_from_the_one_before(trainer):
    trainer.train(*SHORT)
    whole = computed(trainer.metrics())
    for damage in (lose_shard, cut_shard, lose_manifest, leave_unfinished):
        damage(trainer.checkpoint(8))
        output = trainer.train(*SHORT)
        assert "at step 6" in output
        assert damage is leave_unfinished or "checkpoint step-00000008 is damaged: " in output
        assert computed(trainer.metrics()) == whole


def test_if_all_checkpoints_are_damaged_the_run_stops_names_them_and_starts_nothing_anew(trainer):
    trainer.train(*SHORT, stop_after=4)
    for step in (2, 4):
        lose_shard(trainer.checkpoint(step))
    lines = trainer.metrics()
    with pytest.raises((UserError, RunError)) as caught:
        trainer.train(*SHORT)
    assert all(f"step-{step:08}" in str(caught.value) for step in (2, 4))
    assert trainer.metrics() == lines


def test_lines_that_a_full_disk_refused_are_written_when_there_is_room_and_no_step_waits(trainer, monkeypatch):
    trainer.train(*SHORT, "--name", "whole")
    real, calls = os.pwrite, []

    def refuses_for_a_while(*arguments):
        calls.append(1)
        if 3 <= len(calls) < 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr("fivefold.observe.lines.os.pwrite", refuses_for_a_while)
    output = trainer.train(*SHORT)
    assert output.count("metrics.jsonl: No space left on device; training goes on") == 1
    assert computed(trainer.metrics()) == computed(trainer.metrics("whole"))
    kinds = [event["kind"] for event in trainer.events()]
    assert kinds == ["started", *["checkpoint_saved"] * 4, "finished"]


def test_on_a_disk_that_is_really_full_training_goes_on_and_the_old_checkpoints_stay(small_disk, trainer):  # noqa: F811
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(13 << 18))  # of 4 MiB; what is left takes two checkpoints
    with pytest.raises(RunError, match=r"step 8 could not be saved.*Make room"):
        trainer.train(*SHORT, "--checkpoint.keep", "10")
    assert {path.name for path in trainer.checkpoint(2).parent.iterdir()} == {"step-00000002", "step-00000004"}
    assert [line["step"] for line in trainer.metrics()] == list(range(1, 9))
    ballast.unlink()
    assert "at step 4" in trainer.train(*SHORT, "--checkpoint.keep", "1")
    assert trainer.checkpoint(8).is_dir()
