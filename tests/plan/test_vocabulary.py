"""Which vocabulary a run has is said, and where it is not the preset's, or not the data's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from fivefold import Run
from fivefold.cli import commands
from fivefold.data.tokenizer import train
from fivefold.errors import UserError
from fivefold.plan.vocabulary import known_vocabulary, vocabulary_notes, with_vocabulary

RUN_FILE = """\
name: a
steps: 10
cluster: {gpu: h100, gpus: 8}
model: {preset: llama-3-8b}
data: {train: [{path: data/a}, {path: data/b}], seq_len: 64}
"""
AUTO = ("--model.vocab", "auto")
OF_DATA = "the vocabulary is 8,192, that of data/b, and not the 128,256 of llama-3-8b"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with run.yaml and two token sets, of which the second says its vocabulary."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    for name in ("a", "b"):
        (tmp_path / "data" / name).mkdir(parents=True)
    (tmp_path / "data" / "b" / "dataset.json").write_text('{"vocab": 8192}')
    return tmp_path


def run(*flags: str) -> Run:
    return Run.load("run.yaml", flags)


def test_auto_is_that_of_the_data_and_says_what_the_preset_has() -> None:
    assert known_vocabulary(run(*AUTO)) == 8192
    assert vocabulary_notes(run(*AUTO)) == (OF_DATA,)


@pytest.mark.parametrize("command", ["check", "plan", "plan --ranks"])
def test_check_and_plan_note_it(command: str) -> None:
    found = CliRunner().invoke(commands, [*command.split(), "run.yaml", *AUTO, "--batch.global_size", "8"])
    assert f"note: {OF_DATA}" in found.stdout


def test_a_plan_says_how_large_the_vocabulary_is() -> None:
    words = ["plan", "run.yaml", "--batch.global_size", "8"]
    assert "8.03B parameters, vocabulary 128,256; a step" in CliRunner().invoke(commands, words).stdout
    assert json.loads(CliRunner().invoke(commands, [*words, "--json"]).stdout)["run"]["vocabulary"] == 128256


def test_a_number_of_ones_own_is_told_apart_from_the_presets() -> None:
    (note, _) = vocabulary_notes(run("--model.vocab", "32000"))
    assert note == "the vocabulary is 32,000, as model.vocab says, and not the 128,256 of llama-3-8b"


@pytest.mark.parametrize(
    ("rows", "fate"),
    [
        (8191, "the tokenizer of data/b has 8,192 tokens, and model.vocab = 8,191 rows: training refuses a token"),
        (9103, "the tokenizer of data/b has 8,192 tokens, and model.vocab = 9,103 rows: the other rows are never used"),
        (8192, None),
        (9102, None),
    ],
)
def test_rows_that_are_not_the_tokenizers_are_told_but_for_padding(rows: int, fate: str | None) -> None:
    notes = vocabulary_notes(run("--model.preset", "tiny-llama", "--model.vocab", str(rows)))
    assert [note[: len(fate or "")] for note in notes] == ([] if fate is None else [fate])


def test_a_tokenizer_that_the_run_names_goes_before_that_of_the_data(folder: Path) -> None:
    tokenizer = train(["some text"], 260)
    tokenizer.save(folder / "mine")
    assert known_vocabulary(run(*AUTO, "--data.tokenizer", "mine")) == tokenizer.vocab_size
    assert known_vocabulary(run(*AUTO, "--data.tokenizer", "gone")) is None


def test_what_nothing_says_is_asked_for_with_the_number_of_the_preset(folder: Path) -> None:
    (folder / "data" / "b" / "dataset.json").unlink()
    with pytest.raises(UserError, match=r"give --model\.vocab 128256, that of llama-3-8b"):
        with_vocabulary(run(*AUTO))
    assert vocabulary_notes(run(*AUTO)) == (
        "model.vocab = auto will be the vocabulary of the data, which is not there yet; llama-3-8b has 128,256",
    )
    with pytest.raises(UserError, match=r"give --model\.vocab N"):
        with_vocabulary(run("--model.preset", "tiny-llama"))


def test_a_preset_without_a_vocabulary_has_nothing_to_differ_from() -> None:
    assert vocabulary_notes(run("--model.preset", "tiny-llama")) == ()


def test_so_it_is_with_a_hugging_face_directory(folder: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = {"intermediate_size": 128, "vocab_size": 500, "rms_norm_eps": 1e-5, "max_position_embeddings": 64}
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(config | sizes))
    flags = ("--model.preset", "null", "--model.from", "hf")
    assert vocabulary_notes(run(*flags, *AUTO)) == ("the vocabulary is 8,192, that of data/b, and not the 500 of hf",)
