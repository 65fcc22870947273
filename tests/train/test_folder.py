"""The folder of a run: forks that are killed or repeated, options that contradict each other, locks, whole files."""

import os

import pytest

from fivefold.checkpoint.find import open_checkpoint
from fivefold.config.files import ConfigError
from fivefold.data.tokenizer import train as train_tokenizer
from fivefold.errors import UserError
from fivefold.train.job import Job
from tests.train.conftest import write_tokens

SHORT = ("--steps", "8", "--checkpoint.every", "4", "--validate.every", "null")


def test_a_fork_has_a_checkpoint_of_its_own_before_its_first_step(trainer, monkeypatch):
    """It had none until its first regular save, so that a killed fork began anew with random weights."""
    trainer.train(*SHORT, stop_after=4)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Job, "report", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(*SHORT, fork="branch")
    assert "resumed from" in trainer.train(*SHORT, "--name", "branch")
    assert [line["step"] for line in trainer.metrics("branch")] == [5, 6, 7, 8]


def test_a_fork_that_was_killed_before_it_had_anything_can_be_made_again(trainer, monkeypatch):
    trainer.train(*SHORT, stop_after=4)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fivefold.train.opening.build_pipeline", killed)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(*SHORT, fork="branch")
    trainer.train(*SHORT, fork="branch")
    assert [line["step"] for line in trainer.metrics("branch")] == [5, 6, 7, 8]


def test_a_fork_of_a_finished_run_can_be_used_and_resumed(trainer):
    """It had a run file and no checkpoint, as there was no step to take."""
    trainer.train(*SHORT)
    trainer.train(*SHORT, fork="branch")
    assert trainer.checkpoint(8, "branch").is_dir()
    trainer.train(*SHORT, "--name", "branch", "--steps", "9")
    assert [line["step"] for line in trainer.metrics("branch")] == [9]


def test_a_fork_onto_other_data_reads_it_from_its_beginning(trainer):
    """The cursor of the old data would leave out the beginning of the new."""
    trainer.train(*SHORT, stop_after=4)
    other = write_tokens(trainer.file.parent / "other", seed=1)
    trainer.train(*SHORT, "--data.train.0.path", str(other), fork="branch")
    state = open_checkpoint(trainer.out / "branch").state
    assert (state["step"], state["samples"], state["tokens"]) == (8, 4 * 8, 8 * 8 * 32)


@pytest.mark.parametrize("name", ["../elsewhere", "a/b", "", ".hidden"])
def test_a_fork_needs_a_name_that_is_a_folder(trainer, name):
    trainer.train(*SHORT, stop_after=1)
    before = sorted(trainer.file.parent.rglob("*"))
    with pytest.raises(ConfigError, match="it becomes a folder"):
        trainer.train(*SHORT, fork=name)
    assert sorted(trainer.file.parent.rglob("*")) == before


@pytest.mark.parametrize("options", [{"restart": True, "resume": "must"}, {"restart": True, "fork": "b"}])
def test_options_that_contradict_each_other_move_nothing_aside(trainer, options):
    trainer.train(*SHORT, stop_after=1)
    with pytest.raises(UserError, match="exclude each other"):
        trainer.train(*SHORT, **options)
    assert [each.name for each in trainer.out.iterdir()] == ["small"]


def test_a_start_that_was_refused_lets_others_have_the_folder(trainer):
    trainer.train(*SHORT, stop_after=1)
    with pytest.raises(UserError, match="another model, data or seed"):
        trainer.train(*SHORT, "--seed", "1")
    assert "resumed from" in trainer.run(*SHORT, "--steps", "2")


def test_a_file_system_without_locks_can_hold_a_run(trainer, monkeypatch):
    """Lustre without its flock option says so; it was taken for a run under way."""

    def without(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", without)
    trainer.train(*SHORT)
    assert len(trainer.metrics()) == 8


def test_a_reader_of_the_runs_tokenizer_never_meets_half_a_file(trainer):
    """A resume wrote into the files themselves, so that a kill could leave a run without a tokenizer."""
    train_tokenizer(["a text"], 300).save(trainer.file.parent / "tokenizer")
    flags = (*SHORT, "--model.vocab", "300", "--data.tokenizer", str(trainer.file.parent / "tokenizer"))
    trainer.train(*flags, stop_after=1)
    file = trainer.out / "small" / "tokenizer.json"
    with file.open(encoding="utf-8") as reader:
        trainer.train(*flags, stop_after=1)
        assert os.fstat(reader.fileno()).st_nlink == 0, "the old file was written over"
        assert reader.read() == file.read_text(encoding="utf-8")


def test_large_indexes_are_read_once_a_start_and_not_at_each_save(trainer, monkeypatch):
    read = []
    monkeypatch.setattr("fivefold.train.sources._content", lambda source: read.append(source.name) or {})
    trainer.train(*SHORT, "--checkpoint.every", "1")
    assert len(read) == 1
