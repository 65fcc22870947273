"""Token sets on disk: reading back what was written, pairs of other tools, and every way to break one."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from fivefold.data.indexed import MAGIC
from fivefold.data.tokens import TokenSet
from fivefold.data.writer import TokenWriter, token_dtype
from fivefold.errors import UserError
from tests.data.corpora import write_set


def write_pair(
    prefix: Path,
    sequences: list[list[int]],
    boundaries: list[int],
    dtype: str = "<i4",
    code: int = 4,
    tail: bytes = b"",
) -> None:
    """A pair as another tool writes it, from its published layout alone."""
    itemsize = np.dtype(dtype).itemsize
    lengths = np.array([len(each) for each in sequences], "<i4")
    offsets = (np.cumsum(lengths, dtype="<i8") - lengths) * itemsize
    header = MAGIC + struct.pack("<QBQQ", 1, code, len(sequences), len(boundaries))
    index = header + lengths.tobytes() + offsets.astype("<i8").tobytes() + np.array(boundaries, "<i8").tobytes() + tail
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(np.array([t for each in sequences for t in each], dtype).tobytes())


def patch(file: Path, at: int, data: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[at : at + len(data)] = data
    file.write_bytes(content)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    tokens = write_set(tmp_path / "set", [3, 1, 5])
    assert tokens.tokens == 9
    assert tokens.read(0, 9).tolist() == [1, 2, 0, 0, 5, 6, 7, 8, 0]
    assert tokens.read(4, 2).tolist() == [5, 6]
    assert tokens.documents_in(0, 9).tolist() == [0, 3, 4]
    assert tokens.documents_in(1, 3).tolist() == [2]
    assert tokens.documents_before(np.array([0, 1, 3, 4, 5, 9])).tolist() == [0, 1, 1, 2, 3, 3]


def test_index_is_laid_out_byte_for_byte_as_published(tmp_path: Path) -> None:
    write_set(tmp_path / "ours", [3, 1, 5])
    write_pair(tmp_path / "theirs", [[1, 2, 0], [0], [5, 6, 7, 8, 0]], [0, 1, 2, 3], "<u2", 8)
    assert (tmp_path / "ours/tokens.idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()
    assert (tmp_path / "ours/tokens.bin").read_bytes() == (tmp_path / "theirs.bin").read_bytes()
    assert (tmp_path / "ours/tokens.idx").stat().st_size == 102


@pytest.mark.parametrize(("dtype", "code"), [("u1", 1), ("i1", 2), ("<i2", 3), ("<i4", 4), ("<i8", 5), ("<u2", 8)])
def test_every_integer_type_is_read(tmp_path: Path, dtype: str, code: int) -> None:
    write_pair(tmp_path / "a", [[1, 2], [3], [100]], [0, 1, 2, 3], dtype, code)
    assert TokenSet.open(tmp_path / "a").read(0, 4).tolist() == [1, 2, 3, 100]


def test_documents_of_several_sequences_and_empty_ones_begin_where_their_tokens_do(tmp_path: Path) -> None:
    # [1 2 3] in two sequences, an empty document, [4], one of an empty sequence, [5 6], an empty one at the end
    write_pair(tmp_path / "a", [[1, 2], [3], [4], [], [5, 6]], [0, 2, 2, 3, 4, 5, 5])
    tokens = TokenSet.open(tmp_path / "a")
    assert tokens.documents_in(0, tokens.tokens).tolist() == [0, 3, 4]
    assert tokens.documents_before(np.array([1, 4, 6])).tolist() == [1, 2, 3]


def test_prefix_and_file_names_open_the_same_pair(tmp_path: Path) -> None:
    write_pair(tmp_path / "a.v1", [[1, 2]], [0, 1])
    for name in ("a.v1", "a.v1.bin", "a.v1.idx"):
        assert TokenSet.open(tmp_path / name).tokens == 2


def test_uint16_below_65500_tokens_else_int32() -> None:
    assert token_dtype(65_499) == np.dtype("<u2")
    assert token_dtype(65_500) == np.dtype("<i4")


def test_modes_of_a_text_set_are_ignored_and_other_modes_refused(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1, 2], [3]], [0, 1, 2], tail=bytes([0, 0]))
    assert TokenSet.open(tmp_path / "a").tokens == 3
    write_pair(tmp_path / "b", [[1, 2], [3]], [0, 1, 2], tail=bytes([0, 1]))
    with pytest.raises(UserError, match="multimodal"):
        TokenSet.open(tmp_path / "b")


BROKEN = {
    "magic": (lambda p: patch(p, 0, b"X"), "is no .idx file"),
    "version": (lambda p: patch(p, 9, b"\x02"), "has version 2; only version 1"),
    "unknown type": (lambda p: patch(p, 17, b"\x63"), "unknown dtype code 99"),
    "float type": (lambda p: patch(p, 17, b"\x07"), r"holds float32 numbers \(dtype code 7\)"),
    "header cut": (lambda p: p.write_bytes(p.read_bytes()[:20]), "cut short: 20 bytes, but the header alone has 34"),
    "arrays cut": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "is cut short: 81 bytes, but 2 sequences .* take 82"),
    "too long": (lambda p: p.write_bytes(p.read_bytes() + b"123"), "too long: 85 bytes, but 2 sequences .* take 82"),
    "length": (lambda p: patch(p, 34, b"\xff\xff\xff\xff"), "sequence 0 has the length -1"),
    "offset": (lambda p: patch(p, 42 + 8, b"\x04"), "sequence 1 begins at byte 4, but the one before ends at byte 8"),
    "first boundary": (lambda p: patch(p, 58, b"\x01"), "runs from 1 to 2 instead of from 0 to 2"),
    "last boundary": (lambda p: patch(p, 58 + 16, b"\x07"), "runs from 0 to 7 instead of from 0 to 2"),
    "boundaries fall": (lambda p: patch(p, 58 + 8, b"\x05"), "falls from 5 to 2 at entry 2"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_index_is_named_with_the_numbers(tmp_path: Path, fault: str) -> None:
    write_pair(tmp_path / "a", [[1, 2], [3]], [0, 1, 2])
    breaks, message = BROKEN[fault]
    breaks(tmp_path / "a.idx")
    with pytest.raises(UserError, match=message) as caught:
        TokenSet.open(tmp_path / "a")
    assert "a.idx" in str(caught.value)


def test_a_short_bin_is_named_with_both_sizes(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1, 2], [3]], [0, 1, 2])
    (tmp_path / "a.bin").write_bytes(b"12345678")
    with pytest.raises(UserError, match=r"a\.bin has 8 bytes, but .*a\.idx lists 3 tokens of 4 bytes, which are 12"):
        TokenSet.open(tmp_path / "a")


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1]], [0, 1])
    (tmp_path / "a.bin").unlink()
    with pytest.raises(UserError, match=r"a\.bin not found"):
        TokenSet.open(tmp_path / "a")


def test_a_sidecar_of_another_set_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path / "a", [3, 2])
    write_set(tmp_path / "b", [3])
    (tmp_path / "b/dataset.json").write_bytes((tmp_path / "a/dataset.json").read_bytes())
    with pytest.raises(UserError, match=r"speaks of 5 tokens in 2 documents, but .* of 3 in 1"):
        TokenSet.open(tmp_path / "b")
    (tmp_path / "b/dataset.json").write_text("{")
    with pytest.raises(UserError, match=r"dataset\.json cannot be read"):
        TokenSet.open(tmp_path / "b")


@pytest.mark.parametrize(
    ("key", "value"),
    [("max_token", None), ("max_token", "many"), ("eod", "x"), ("tokens", "5"), ("checksums", None), ("checksums", [])],
)
def test_a_sidecar_whose_values_have_the_wrong_type_is_named(tmp_path: Path, key: str, value: object) -> None:
    """They were found by a traceback when the first vocabulary was compared, or the first short window filled."""
    write_set(tmp_path / "a", [3, 2])
    meta = json.loads((tmp_path / "a/dataset.json").read_text())
    (tmp_path / "a/dataset.json").write_text(json.dumps({**meta, key: value}))
    with pytest.raises(UserError, match=rf"dataset\.json is damaged \({key} is {re.escape(repr(value))}\)"):
        TokenSet.open(tmp_path / "a")


@pytest.mark.parametrize("text", ["[]", "null", "[" * 100_000])
def test_a_sidecar_that_is_no_object_is_named(tmp_path: Path, text: str) -> None:
    write_set(tmp_path / "a", [3, 2])
    (tmp_path / "a/dataset.json").write_text(text)
    with pytest.raises(UserError, match=r"dataset\.json cannot be read"):
        TokenSet.open(tmp_path / "a")


def test_ids_beyond_the_vocabulary_are_found_with_their_place(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[1, 2], [70_000]], [0, 1, 2])
    TokenSet.open(tmp_path / "a").check_vocabulary(70_001)
    with pytest.raises(UserError, match="token 2 of 3 has the id 70000, but the model's vocabulary has 70000 ids"):
        TokenSet.open(tmp_path / "a").check_vocabulary(70_000)
    write_pair(tmp_path / "n", [[1, -5]], [0, 1])
    with pytest.raises(UserError, match="token 1 of 2 has the id -5"):
        TokenSet.open(tmp_path / "n").check_vocabulary(100)


def test_a_set_of_ours_knows_its_highest_id_without_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = write_set(tmp_path / "a", [500])
    with pytest.raises(UserError, match="token 399 of 500 has the id 400"):
        tokens.check_vocabulary(400)
    monkeypatch.setattr(tokens, "read", None)
    tokens.check_vocabulary(500)


def test_a_flipped_bit_is_found_by_verify(tmp_path: Path) -> None:
    tokens = write_set(tmp_path / "a", [50])
    tokens.verify()
    data = tokens.bin.read_bytes()
    patch(tokens.bin, 10, bytes([data[10] ^ 1]))
    with pytest.raises(UserError, match=r"tokens\.bin is damaged: its xxh3 is"):
        TokenSet.open(tmp_path / "a").verify()


def test_an_empty_set_opens_and_holds_nothing(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "a", 300, 0)
    assert writer.close()["max_token"] == -1
    tokens = TokenSet.open(tmp_path / "a")
    assert (tokens.tokens, len(tokens.starts)) == (0, 0)


def test_many_documents_are_indexed_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.data.indexed.CHUNK", 7)
    monkeypatch.setattr("fivefold.data.tokens.CHUNK", 7)
    lengths = [1 + i % 5 for i in range(50)]
    tokens = write_set(tmp_path / "a", lengths)
    assert tokens.documents_in(0, tokens.tokens).tolist() == [sum(lengths[:i]) for i in range(50)]
    assert json.loads((tmp_path / "a/dataset.json").read_text())["documents"] == 50
