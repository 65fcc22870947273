"""Input that no run can use: one message with the numbers, before anything is written; what was there stays."""

import errno
import os
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from fivefold import Run
from fivefold.data.writer import TokenWriter
from fivefold.errors import UserError
from fivefold.train.opening import resolve
from fivefold.train.use import export_run
from tests.train.conftest import VOCAB
from tests.train.test_resume import files_of

HELD = "--data.validation=[{name: held, path: %s}]"


def token_set(folder, lengths):
    """A set of documents of these lengths in `folder`."""
    writer = TokenWriter(folder, VOCAB, eod=0)
    writer.write(np.arange(sum(lengths)) % VOCAB, np.array(lengths, dtype=np.int64))
    writer.close()
    return folder


def cut(file):
    file.write_bytes(file.read_bytes()[:-9])


def refusal(trainer, *flags, **options):
    with pytest.raises(UserError) as caught:
        trainer.train(*flags, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: cut(data / "tokens.idx"), "tokens.idx is cut short"),
        (lambda data: cut(data / "tokens.bin"), "tokens.bin has"),
        (lambda data: (data / "tokens.idx").write_bytes(b""), "tokens.idx is cut short: 0 bytes"),
        (lambda data: (data / "tokens.idx").write_bytes(b"\x7fELF" * 50), "tokens.idx is no .idx file"),
        (lambda data: (data / "tokens.idx").unlink(), "tokens.idx not found"),
        (lambda data: [file.unlink() for file in data.iterdir()], "no token set at"),
        (lambda data: (data / "dataset.json").write_text("{"), "dataset.json cannot be read"),
    ],
    ids=["idx cut", "bin cut", "idx empty", "idx binary", "idx missing", "all missing", "sidecar"],
)
def test_a_damaged_token_set_is_named_by_its_file(trainer, spoil, says):
    spoil(trainer.file.parent / "tokens")
    assert says in refusal(trainer)
    assert not trainer.out.exists()


@pytest.mark.parametrize(
    ("lengths", "flags", "says"),
    [
        ([20, 12], (), "has 32 tokens, but one sequence takes 33"),
        ([1] * 50, (), "50 tokens in 50 documents: with data.document_mask the first token"),
        ([40], ("--model.vocab", "30"), "token 30 of 40 has the id 30, but the model's vocabulary has 30 ids, 0 to 29"),
        ([40], ("--model.vocab", "auto"), "carries no tokenizer to take it from; set model.vocab"),
        ([40], ("--data.tokenizer", "./nowhere"), "no tokenizer at ./nowhere"),
    ],
)
def test_tokens_that_the_model_cannot_learn_are_refused(trainer, monkeypatch, lengths, flags, says):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    data = token_set(trainer.file.parent / "other", lengths)
    assert says in refusal(trainer, "--data.train.0.path", str(data), HELD % data, *flags)
    assert not trainer.out.exists()


def test_a_vocabulary_that_only_the_data_tells_and_that_tp_cannot_cut_is_refused(trainer, monkeypatch):
    """Nine rows over four ranks are 3, 3, 3 and none."""
    monkeypatch.setattr("fivefold.train.opening.vocabulary", lambda run, data: 9)
    monkeypatch.setattr("fivefold.train.opening.check_vocabulary", lambda data, vocab: None)
    ranks = SimpleNamespace(from_main=lambda work: work(), dp=1, world=4)
    run = Run.load(trainer.file, ["--model.vocab", "auto", "--model.kv_heads", "4", "--parallel.tp", "4"])
    with pytest.raises(UserError, match=r"model\.vocab = 9 has no row for each of parallel\.tp = 4 ranks"):
        resolve(run, ranks)


@pytest.mark.parametrize(
    ("lengths", "flags", "says"),
    [
        ([], (), "has 0 tokens: a validation set needs two at least"),
        ([1], (), "has 1 tokens: a validation set needs two at least"),
        ([1, 1, 1], (), "3 tokens in 3 documents"),
        ([100], ("--validate.tokens", "31"), "validate.tokens 31 is less than one sequence: data.seq_len is 32"),
    ],
)
def test_a_validation_set_without_a_target_is_refused_at_the_start_and_at_a_resume(trainer, lengths, flags, says):
    held = token_set(trainer.file.parent / "held", lengths)
    assert says in refusal(trainer, HELD % held, *flags)
    assert not trainer.out.exists()
    trainer.train(stop_after=2)
    before = files_of(trainer.out)
    assert says in refusal(trainer, HELD % held, *flags)
    assert files_of(trainer.out) == before
    trainer.train(HELD % held, *flags, "--validate.every", "null", stop_after=1)


def test_weights_that_do_not_fit_leave_no_run_behind_and_put_none_aside(trainer):
    trainer.train("--steps", "1")
    before = files_of(trainer.out)
    hf = trainer.file.parent / "hf"
    export_run(trainer.out / "small", hf)
    load = ("--model.from", str(hf), "--model.weights", "load", "--model.tied", "true")
    assert "differs from the embedding, but model.tied is true" in refusal(trainer, *load, "--name", "other")
    assert "differs from the embedding, but model.tied is true" in refusal(trainer, *load, restart=True)
    assert files_of(trainer.out) == before
    assert {path.name for path in trainer.out.iterdir()} == {"small"}
    trainer.train("--model.from", str(hf), "--model.weights", "load", "--name", "other", stop_after=1)
    assert trainer.metrics("other")[0]["val_loss/held"] == trainer.metrics()[-1]["val_loss/held"]


def test_a_fork_of_a_run_without_a_checkpoint_leaves_nothing_behind(trainer):
    trainer.train("--checkpoint.every", "never", stop_after=1)
    assert "has no checkpoint to start from" in refusal(trainer, fork="branch")
    assert {path.name for path in trainer.out.iterdir()} == {"small"}
    assert "has no checkpoint to start from" in refusal(trainer, fork="branch")


def test_a_place_where_no_folder_can_be_made_is_named(trainer):
    (trainer.file.parent / "file").write_text("")
    out = trainer.file.parent / "file" / "runs"
    assert f"cannot write the run's folder {out / 'small'}: " in refusal(trainer, "--out", str(out))


def test_a_disk_that_is_full_at_the_start_is_named_and_the_next_start_works(trainer, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("fivefold.train.folder.os.fsync", full)
        patch.setattr("fivefold.train.folder.os.write", full)  # the note in the lock file: the folder then stayed
        message = refusal(trainer)
    assert "No space left on device; make room" in message
    assert not trainer.out.exists()
    trainer.train(stop_after=1)


def test_a_start_killed_while_it_made_its_folder_is_no_riddle_to_the_next(trainer):
    folder = trainer.out / "small"
    folder.mkdir(parents=True)
    (folder / ".lock").write_text("pid 1")
    (folder / ".run.yaml.writing").write_text("name: sm")
    trainer.train(stop_after=1)
    assert trainer.metrics()[-1]["step"] == 1


@pytest.mark.parametrize("content", [b"\x00\xff", b"", b"name: small\n", b"- a\n"])
def test_a_run_whose_own_file_is_damaged_is_named_and_can_be_put_aside(trainer, content):
    trainer.train(stop_after=1)
    (trainer.out / "small" / "run.yaml").write_bytes(content)
    before = files_of(trainer.out)
    message = refusal(trainer)
    assert f"{trainer.out / 'small' / 'run.yaml'}" in message
    assert "mend it, or use --restart" in message
    assert files_of(trainer.out) == before
    trainer.train(restart=True, stop_after=2)
    assert [line["step"] for line in trainer.metrics()] == [0, 1, 2]
    (archived,) = trainer.out.glob("small.archived-*")
    assert (archived / "run.yaml").read_bytes() == content


def test_damaged_lines_of_an_earlier_start_do_not_stop_a_resume(trainer):
    trainer.train(stop_after=2)
    for name in ("metrics.jsonl", "events.jsonl"):
        file = trainer.out / "small" / name
        file.write_bytes(b"\x00\xff\n" + file.read_bytes() + b'{"step": 9')
    trainer.train(stop_after=1)
    assert [line["step"] for line in trainer.metrics()] == [0, 1, 2, 3]
    assert [event["kind"] for event in trainer.events()][:2] == ["started", "checkpoint_saved"]


@pytest.mark.parametrize("error", [UserError("no"), SystemExit(2)], ids=["main rank", "another rank"])
def test_an_error_lets_go_of_the_process_groups(trainer, monkeypatch, error):
    """Its traceback held them; bad input now and then ended in SIGABRT, for their threads outlived Python."""
    meshes = []

    def failing_train(run, mesh, options):
        meshes.append(weakref.ref(mesh))
        cycle = [mesh]
        cycle.append(cycle)
        raise error

    monkeypatch.setattr("fivefold.train.loop.train", failing_train)
    with pytest.raises(type(error)):
        trainer.train()
    assert [mesh() for mesh in meshes] == [None]
