"""Builds as a whole: the same bytes for any number of workers, held-out documents, whole folders or none, repeats."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fivefold.data import build as build_room
from fivefold.data.publish import Workshop
from fivefold.data.tokenizer import Tokenizer
from fivefold.data.tokens import TokenSet
from fivefold.data.writer import TokenWriter
from fivefold.errors import RunError, UserError
from tests.data.corpora import make, texts


def jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def corpus(folder: Path, count: int = 400) -> Path:
    """Some thousand words in JSONL, text and a folder in the folder."""
    words = ["alpha", "beta", "gamma's", "delta", "12345", "Grüße", "东京", "\n", "return x"]
    rng = np.random.default_rng(0)
    documents = [" ".join(rng.choice(words, rng.integers(1, 60))) + f" {number}" for number in range(count)]
    (folder / "deeper").mkdir(parents=True)
    jsonl(folder / "lines.jsonl", documents[: count // 2])
    for number, text in enumerate(documents[count // 2 :]):
        (folder / "deeper" / f"{number:04}.txt").write_text(text)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_build_holds_the_documents_in_order_and_all_that_belongs_to_them(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    result = make([tmp_path / "b.txt", tmp_path / "a.txt"], tmp_path / "out/mine")
    assert texts(tmp_path / "out/mine") == ["second", "first"]
    assert {path.name for path in (tmp_path / "out/mine").iterdir()} == {
        *("tokens.bin", "tokens.idx", "dataset.json", "tokenizer.json", "tokenizer_config.json", "inputs.jsonl")
    }
    tokens = TokenSet.open(tmp_path / "out/mine")
    eod = Tokenizer.load(tmp_path / "out/mine").eod
    assert tokens.meta == result.train
    assert tokens.eod == eod
    assert int((tokens.read(0, tokens.tokens) == eod).sum()) == 2
    assert result.train["text_bytes"] == 11
    assert tokens.tokenizer == tmp_path / "out/mine"
    assert "2 documents" in result.summary()


def test_the_same_bytes_come_out_for_any_number_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.data.inputs.MOST_FILES", 16)
    monkeypatch.setattr("fivefold.data.decompress.BLOCK", 4096)
    source = corpus(tmp_path / "in")
    for workers in (1, 2):
        make(source, tmp_path / f"out{workers}", workers=workers, val_fraction=0.1, dedup="exact")
    for part in ("", "-val"):
        assert files(tmp_path / f"out1{part}") == files(tmp_path / f"out2{part}")
    assert TokenSet.open(tmp_path / "out1").meta["documents"] > 300  # type: ignore[index]


def test_a_fault_in_the_input_ends_a_build_with_many_workers_with_its_message(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["word " * 50] * 9000)
    with source.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UserError, match=r"a\.jsonl, line 9001 is no valid JSON"):
        make(source, tmp_path / "out", workers=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def kill_self(block: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_ends_the_build_with_a_message_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.data.encode.work", kill_self)
    monkeypatch.setattr("fivefold.data.inputs.MOST_FILES", 50)
    source = corpus(tmp_path / "in")
    with pytest.raises(RunError, match="one of the 2 workers was killed"):
        make(source, tmp_path / "out/mine", workers=2)
    assert list((tmp_path / "out").iterdir()) == []


def test_held_out_documents_depend_on_their_text_and_the_seed_alone(tmp_path: Path) -> None:
    documents = [f"document {number}" for number in range(300)]
    jsonl(tmp_path / "a.jsonl", documents)
    jsonl(tmp_path / "b.jsonl", documents[::-1])
    for name in "ab":
        make(tmp_path / f"{name}.jsonl", tmp_path / name, val_fraction=0.2)
    assert sorted(texts(tmp_path / "a-val")) == sorted(texts(tmp_path / "b-val"))
    assert sorted(texts(tmp_path / "a") + texts(tmp_path / "a-val")) == sorted(documents)
    assert 30 < len(texts(tmp_path / "a-val")) < 90
    make(tmp_path / "a.jsonl", tmp_path / "c", val_fraction=0.2, seed=1)
    assert set(texts(tmp_path / "a-val")) != set(texts(tmp_path / "c-val"))


def test_copies_of_a_document_stay_on_one_side(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"document {number % 50}" for number in range(500)])
    make(source, tmp_path / "out", val_fraction=0.3)
    assert not set(texts(tmp_path / "out")) & set(texts(tmp_path / "out-val"))


def test_one_document_at_least_is_held_out_if_there_are_two(tmp_path: Path) -> None:
    documents = [f"document {number}" for number in range(9)]
    source = jsonl(tmp_path / "a.jsonl", documents)
    result = make(source, tmp_path / "out", val_fraction=1e-9)
    assert len(texts(tmp_path / "out-val")) == 1
    assert sorted(texts(tmp_path / "out") + texts(tmp_path / "out-val")) == documents
    assert result.validation is not None
    assert result.train["text_bytes"] + result.validation["text_bytes"] == sum(map(len, documents))
    TokenSet.open(tmp_path / "out").verify()
    alone = make(jsonl(tmp_path / "b.jsonl", ["only"]), tmp_path / "alone", val_fraction=0.01)
    assert alone.validation is None
    assert "nothing is held out" in alone.summary()
    assert not (tmp_path / "alone-val").exists()


def test_exact_duplicates_go_only_if_asked(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["one", "two", "one", "three", "two", "one"])
    make(source, tmp_path / "all")
    assert texts(tmp_path / "all") == ["one", "two", "one", "three", "two", "one"]
    result = make(source, tmp_path / "few", dedup="exact")
    assert texts(tmp_path / "few") == ["one", "two", "three"]
    assert result.train["summary"]["skipped"] == {"duplicate": 3}
    assert result.train["summary"]["read"] == 6


def test_a_repeated_build_does_nothing_and_another_is_refused_with_the_difference(tmp_path: Path) -> None:
    # An existing output was taken as done although the options differed (in another system).
    source, more = jsonl(tmp_path / "a.jsonl", ["some text"] * 5), jsonl(tmp_path / "b.jsonl", ["more text"])
    out = tmp_path / "out"
    assert make(source, out, train_tokenizer=512).built
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    again = make(source, out, train_tokenizer=512, workers=2)
    assert not again.built
    assert "already built" in again.summary()
    with pytest.raises(UserError, match=r"train_tokenizer was 512, now 1024; --overwrite builds it again"):
        make(source, out, train_tokenizer=1024)
    with pytest.raises(UserError, match=r"1 input\(s\) new: .*b\.jsonl"):
        make([source, more], out, train_tokenizer=512)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    make([more, source], tmp_path / "two")
    with pytest.raises(UserError, match="in another order"):
        make([source, more], tmp_path / "two")
    jsonl(source, ["other text"] * 5)
    with pytest.raises(UserError, match=r"1 input\(s\) changed: .*a\.jsonl"):
        make(source, out, train_tokenizer=512)
    assert make(source, out, train_tokenizer=512, overwrite=True).built
    assert texts(out) == ["other text"] * 5


def test_another_tokenizer_file_is_a_difference(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["some text"] * 5)
    make(source, tmp_path / "one", train_tokenizer=300)
    make(jsonl(tmp_path / "b.jsonl", ["quite another"] * 5), tmp_path / "two", train_tokenizer=300)
    make(source, tmp_path / "out", tokenizer=str(tmp_path / "one"))
    assert not make(source, tmp_path / "out", tokenizer=str(tmp_path / "one/tokenizer.json")).built
    with pytest.raises(UserError, match="tokenizer was"):
        make(source, tmp_path / "out", tokenizer=str(tmp_path / "two"))


def test_an_overwrite_without_validation_takes_the_old_one_away(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(20)])
    make(source, tmp_path / "out", val_fraction=0.3)
    make(source, tmp_path / "out", val_fraction=0.0, overwrite=True)
    assert not (tmp_path / "out-val").exists()
    assert len(texts(tmp_path / "out")) == 20


def test_a_damaged_output_is_not_taken_as_built(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", ["some text"] * 5)
    make(source, tmp_path / "out")
    data = (tmp_path / "out/tokens.bin").read_bytes()
    (tmp_path / "out/tokens.bin").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(UserError, match=r"tokens\.bin is damaged"):
        make(source, tmp_path / "out")


def test_a_damaged_pair_of_sets_can_be_replaced(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(20)])
    make(source, tmp_path / "out", val_fraction=0.3)
    for part in ("out", "out-val"):
        (tmp_path / part / "tokens.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"tokens\.bin has 0 bytes"):
        make(source, tmp_path / "out", val_fraction=0.3)
    make(source, tmp_path / "out", val_fraction=0.3, overwrite=True)
    assert len(texts(tmp_path / "out")) + len(texts(tmp_path / "out-val")) == 20


def test_what_others_wrote_is_never_replaced(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(20)])
    (tmp_path / "out").mkdir()
    assert make(source, tmp_path / "out").built  # an empty folder is free
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"mine exists and was not written by"):
        make(source, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine/thesis.tex").read_text() == "years of work"
    make(source, tmp_path / "x-val")
    with pytest.raises(UserError, match="x-val is a set of its own"):
        make(source, tmp_path / "x", val_fraction=0.1, overwrite=True)


SLOW = """
import sys, time
from pathlib import Path
from fivefold.data import build
from fivefold.data.recipe import BuildOptions
encode = build.encode_inputs
def slow(*arguments):
    for encoded in encode(*arguments):
        yield encoded
        print("half", flush=True)
        time.sleep(600)
build.encode_inputs = slow
build.build([sys.argv[1]], sys.argv[2], BuildOptions(train_tokenizer=300, workers=1, progress=False))
"""


def test_a_killed_build_leaves_nothing_that_passes_for_a_set_and_is_cleaned_up_by_the_next(tmp_path: Path) -> None:
    source, out = jsonl(tmp_path / "a.jsonl", ["some text"] * 5), tmp_path / "data/mine"
    child = subprocess.Popen([sys.executable, "-c", SLOW, str(source), str(out)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"half\n"
    with pytest.raises(UserError, match=r"another process is building .*mine now"):
        make(source, out)
    child.kill()
    child.wait()
    child.stdout.close()
    assert [path.name for path in out.parent.iterdir()] == [".mine.building"]
    with pytest.raises(UserError, match="no token set"):
        TokenSet.open(out)
    make(source, out)
    assert [path.name for path in out.parent.iterdir()] == ["mine"]


def test_a_full_disk_is_named_and_the_old_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(20)])
    make(source, tmp_path / "out", val_fraction=0.3)
    before = files(tmp_path / "out"), files(tmp_path / "out-val")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for place in ((TokenWriter, "write"), (build_room, "input_list"), (Workshop, "publish")):
        with monkeypatch.context() as patch:
            patch.setattr(*place, full)
            with pytest.raises(RunError, match=r"the disk of .*out is full \(No space left on device\)"):
                make(source, tmp_path / "out", val_fraction=0.2, overwrite=True)
        assert (files(tmp_path / "out"), files(tmp_path / "out-val")) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out", "out-val"]


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_both_sets_appear_or_neither_wherever_the_exchange_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(20)])
    make(source, tmp_path / "out", val_fraction=0.3)
    before = files(tmp_path / "out"), files(tmp_path / "out-val")
    move, calls = Workshop._move, []

    def failing(self: Workshop, *arguments: object) -> None:
        calls.append(1)
        if len(calls) == fails_at:
            raise OSError(errno.EIO, "broken")
        move(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Workshop, "_move", failing)
    with pytest.raises(OSError, match="broken"):
        make(source, tmp_path / "out", val_fraction=0.2, overwrite=True)
    assert (files(tmp_path / "out"), files(tmp_path / "out-val")) == before


@pytest.mark.parametrize("done", [1, 2, 3, 4])
def test_an_exchange_cut_short_by_a_kill_is_undone_or_complete(tmp_path: Path, done: int) -> None:
    """After any number of the four renames the next command finds the old pair or the new one, never one of each."""
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(20)])
    out, val = tmp_path / "out", tmp_path / "out-val"
    make(source, out, val_fraction=0.3)
    make(source, tmp_path / "new", val_fraction=0.2)
    before, after = (files(out), files(val)), (files(tmp_path / "new"), files(tmp_path / "new-val"))
    shop = tmp_path / ".out.building"
    (shop / "old").mkdir(parents=True)
    renames = [
        (val, shop / "old/out-val"),
        (out, shop / "old/out"),
        (tmp_path / "new-val", val),
        (tmp_path / "new", out),
    ]
    for origin, destination in renames[:done]:
        origin.rename(destination)
    with Workshop(out):
        pass
    assert (files(out), files(val)) == (after if done == 4 else before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_tokenizer": None}, "give one of --train-tokenizer"),
        ({"tokenizer": "a", "train_tokenizer": 300}, "give one of --train-tokenizer"),
        ({"val_fraction": 1.0}, r"--val-fraction 1\.0 is not a share"),
        ({"val_fraction": float("nan")}, "--val-fraction nan"),
        ({"workers": 0}, "--workers 0"),
        ({"dedup": "fuzzy"}, "--dedup fuzzy: known are none and exact"),
    ],
)
def test_senseless_options_are_refused(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(jsonl(tmp_path / "a.jsonl", ["text"]), tmp_path / "out", **options)


def test_a_sample_for_training_is_spread_over_the_corpus_and_bounded() -> None:
    from fivefold.data.encode import spread_sample
    from fivefold.data.read import JsonLines

    blocks = [
        JsonLines("x", 1, 0, b"".join(b'{"text": "%04d %s"}\n' % (n, b"x" * 80) for n in range(b, b + 10)), 1000)
        for b in range(0, 5000, 10)
    ]
    taken = list(spread_sample(iter(blocks), "text", 20_000))
    assert 8_000 < sum(map(len, taken)) <= 20_000
    numbers = np.array([int(text[:4]) for text in taken])
    assert numbers.min() < 500
    assert numbers.max() > 4000
    assert list(spread_sample(iter(blocks), "text", 20_000)) == taken


def test_a_single_long_document_is_sampled_in_pieces() -> None:
    from fivefold.data.encode import spread_pieces

    text = "".join(f"{number:06}" for number in range(10_000))
    pieces = list(spread_pieces(text, 1600))
    assert len(pieces) == 16
    assert sum(map(len, pieces)) == 1600
    assert pieces[0] == text[:100]
    assert pieces[-1] in text[-200:]


def test_time_is_not_part_of_what_is_written(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(20)])
    make(source, tmp_path / "one", val_fraction=0.2)
    time.sleep(0.01)
    make(source, tmp_path / "two", val_fraction=0.2)
    assert files(tmp_path / "one") == files(tmp_path / "two")
