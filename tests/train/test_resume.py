"""What a second start of a run does: go on, refuse, start anew, branch off."""

import errno
import os

import pytest

from fivefold.errors import RunError, UserError
from tests.train.conftest import write_tokens
from tests.train.test_kill_and_resume import computed


def files_of(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file() and file.name != ".lock"}


def test_stop_after_counts_the_steps_of_this_start_and_a_finished_run_changes_nothing(trainer):
    trainer.train(stop_after=25)
    assert trainer.metrics()[-1]["step"] == 25
    trainer.train(stop_after=25)
    assert trainer.metrics()[-1]["step"] == 50
    trainer.train()
    before = files_of(trainer.out)
    assert "is finished" in trainer.train()
    assert files_of(trainer.out) == before
    trainer.train("--steps", "65")
    assert [line["step"] for line in trainer.metrics()] == list(range(66))


def test_a_stop_in_one_process_goes_on_in_another_layout_with_the_same_losses(trainer):
    trainer.train("--name", "whole", "--precision.compute", "fp64", "--steps", "20")
    flags = ("--precision.compute", "fp64", "--steps", "20")
    trainer.train(*flags, stop_after=10)
    trainer.run(*flags, "--nproc", "2", "--batch.micro_size", "4", "--parallel.zero", "3")
    for ours, theirs in zip(trainer.metrics(), trainer.metrics("whole"), strict=True):
        unread = {"update_s"} if ours["step"] == 11 else set()  # of the step before, which another start did
        assert ours.keys() == theirs.keys() - unread
        for key in {"loss", "grad_norm", "val_loss/held"} & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-10)


def test_a_new_learning_rate_holds_from_the_first_resumed_step_and_is_recorded(trainer):
    constant = (
        "--optim.decay",
        "constant",
        "--optim.warmup_fraction",
        "0",
        "--steps",
        "20",
        "--validate.every",
        "null",
    )
    trainer.train(*constant, "--optim.lr", "1e-3", stop_after=10)
    trainer.train(*constant, "--optim.lr", "1e-4")
    assert [line["lr"] for line in trainer.metrics()] == [1e-3] * 10 + [1e-4] * 10
    resumed = next(event for event in trainer.events() if event["kind"] == "resumed")
    assert {"key": "optim.lr", "from": "0.001", "to": "0.0001"} in resumed["changes"]
    assert resumed["device"] == "CPU"


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        ("--seed", "1", "seed: 0 -> 1"),
        ("--model.ffn", "96", "model.ffn: 64 -> 96"),
        ("--data.seq_len", "16", "data.seq_len: 32 -> 16"),
        ("--data.document_mask", "false", "data.document_mask: True -> False"),
        ("--data.train.0.weight", "2", "data.train.0.weight: 1.0 -> 2.0"),
    ],
)
def test_another_model_data_or_seed_is_refused_with_the_difference(trainer, flag, value, says):
    trainer.train(stop_after=1)
    before = files_of(trainer.out)
    with pytest.raises(UserError, match="another model, data or seed") as error:
        trainer.train(flag, value)
    assert says in str(error.value)
    assert "--restart" in str(error.value)
    assert files_of(trainer.out) == before


def test_other_tokens_at_the_same_path_are_refused_and_the_same_tokens_elsewhere_are_not(trainer):
    trainer.train(stop_after=1)
    elsewhere = write_tokens(trainer.file.parent / "elsewhere")
    trainer.train("--data.train.0.path", str(elsewhere), stop_after=1)
    assert trainer.metrics()[-1]["step"] == 2
    write_tokens(trainer.file.parent / "tokens", seed=1)
    with pytest.raises(UserError, match="is not what step-00000002 was trained on"):
        trainer.train()


def test_restart_puts_the_old_run_aside(trainer):
    trainer.train(stop_after=10)
    output = trainer.train("--seed", "1", restart=True, stop_after=3)
    assert [line["step"] for line in trainer.metrics()] == [0, 1, 2, 3]
    (archived,) = trainer.out.glob("small.archived-*")
    assert f"the earlier run of this name is now {archived}" in output
    assert trainer.metrics(archived.name)[-1]["step"] == 10


def test_a_fork_goes_on_under_a_new_name_and_leaves_the_first_run_as_it_was(trainer):
    trainer.train(stop_after=10)
    before = files_of(trainer.out)
    trainer.train("--optim.lr", "1e-4", fork="branch", stop_after=5)
    assert [line["step"] for line in trainer.metrics("branch")] == [11, 12, 13, 14, 15]
    assert {file: content for file, content in files_of(trainer.out).items() if file in before} == before
    with pytest.raises(UserError, match="branch exists already"):
        trainer.train(fork="branch")
    trainer.train("--name", "branch", "--optim.lr", "1e-4", stop_after=1)
    assert trainer.metrics("branch")[-1]["step"] == 16


def test_a_fork_needs_a_run_and_the_same_model(trainer):
    with pytest.raises(UserError, match="there is no run in"):
        trainer.train(fork="branch")
    trainer.train(stop_after=1)
    with pytest.raises(UserError, match="do not fit another model"):
        trainer.train("--model.ffn", "96", fork="branch")
    assert not (trainer.out / "branch").exists()


def test_resume_must_and_never_say_what_is_in_the_way_and_leave_nothing_behind(trainer):
    with pytest.raises(UserError, match=r"there is no run in .* to go on from"):
        trainer.train(resume="must")
    assert not trainer.out.exists()
    trainer.train(stop_after=1)
    with pytest.raises(UserError, match="holds a run already, and --resume is never"):
        trainer.train(resume="never")


def test_a_folder_of_something_else_is_refused(trainer):
    (trainer.out / "small").mkdir(parents=True)
    (trainer.out / "small" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds thesis.tex but no run.yaml"):
        trainer.train()
    with pytest.raises(UserError, match=r"holds thesis.tex but no run.yaml"):
        trainer.train(restart=True)


def test_a_run_that_another_process_trains_is_refused(trainer):
    process = trainer.start()
    try:
        while not (trainer.out / "small" / "metrics.jsonl").exists():
            assert process.poll() is None
        with pytest.raises(UserError, match=r"is being trained by another process \(pid \d+ on"):
            trainer.train()
    finally:
        process.terminate()
        process.communicate()


def test_a_damaged_checkpoint_is_named_and_the_older_one_is_used(trainer):
    trainer.train("--name", "whole")
    trainer.train(stop_after=30)
    shard = max(trainer.checkpoint(30).iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    output = trainer.train()
    assert f"checkpoint step-00000030 is damaged: {shard.name}" in output
    assert "at step 20" in output
    assert computed(trainer.metrics()) == computed(trainer.metrics("whole"))


def test_a_full_disk_does_not_stop_training_and_a_lost_last_save_is_an_error(trainer, monkeypatch):
    trainer.train(stop_after=10)
    older = files_of(trainer.checkpoint(10))

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fivefold.checkpoint.folder.CheckpointFolder.begin", full)
    with pytest.raises(RunError, match="step 60 could not be saved"):
        trainer.train()
    assert trainer.metrics()[-1]["step"] == 60
    failed = [event["step"] for event in trainer.events() if event["kind"] == "checkpoint_failed"]
    assert failed == [20, 30, 40, 50, 60]
    assert files_of(trainer.checkpoint(10)) == older


@pytest.mark.parametrize("every", [None, "never", "1s"])
def test_how_often_the_state_is_saved(trainer, every):
    trainer.train("--checkpoint.every", "null" if every is None else every)
    saved = [event["step"] for event in trainer.events() if event["kind"] == "checkpoint_saved"]
    assert saved == {None: [60], "never": []}.get(every, saved)
    assert every != "1s" or saved[-1] == 60
