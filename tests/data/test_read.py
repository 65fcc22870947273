"""Every kind of input, and every way in which one can be wrong: each with its message, nothing written."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from fivefold.data.tokens import TokenSet
from fivefold.errors import UserError
from tests.data.corpora import make, texts


def summary(path: Path) -> dict[str, Any]:
    """What the build counted; read = written + skipped is checked here for every test that looks."""
    meta = TokenSet.open(path).meta
    assert meta is not None
    counts = meta["summary"]
    assert counts["read"] == counts["written"] + sum(counts["skipped"].values())
    return counts


def refused(source: Path | list[Path], tmp_path: Path, **options: Any) -> str:
    """The message with which a build is refused; nothing may be left behind."""
    out = tmp_path / "refused/out"
    with pytest.raises(UserError) as caught:
        make(source, out, **options)
    assert not out.parent.exists() or not list(out.parent.iterdir())
    return str(caught.value)


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


LINES = b'{"text": "first", "id": 1}\n\n{"id": 2, "text": "second"}'


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json", "a.jsonl.gz", "a.jsonl.zst"])
def test_json_lines_plain_and_compressed(tmp_path: Path, name: str) -> None:
    pack = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(Path(name).suffix, bytes)
    make(put(tmp_path / name, pack(LINES)), tmp_path / "out")
    assert texts(tmp_path / "out") == ["first", "second"]


def test_several_zst_frames_and_gz_members_are_read_on(tmp_path: Path) -> None:
    first, second = b'{"text": "one"}\n{"te', b'xt": "two"}\n'
    compress = zstandard.ZstdCompressor().compress
    make(put(tmp_path / "a.jsonl.zst", compress(first) + compress(second)), tmp_path / "zst")
    make(put(tmp_path / "a.jsonl.gz", gzip.compress(first) + gzip.compress(second)), tmp_path / "gz")
    assert texts(tmp_path / "zst") == texts(tmp_path / "gz") == ["one", "two"]


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_a_compressed_text_is_one_document(tmp_path: Path, name: str) -> None:
    pack = gzip.compress if name.endswith("gz") else zstandard.ZstdCompressor().compress
    make(put(tmp_path / name, pack(b"some\ntext")), tmp_path / "out")
    assert texts(tmp_path / "out") == ["some\ntext"]


def test_a_json_file_that_is_no_list_of_objects_is_a_text(tmp_path: Path) -> None:
    make(put(tmp_path / "a.json", b'{\n "key": 1\n}\n'), tmp_path / "out")
    assert texts(tmp_path / "out") == ['{\n "key": 1\n}\n']


def test_lines_longer_than_a_block_and_blocks_without_a_line_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.data.decompress.BLOCK", 16)
    documents = ["x" * 100, "y", "z" * 50]
    data = "\n".join(json.dumps({"text": text}) for text in documents).encode()
    make(put(tmp_path / "a.jsonl", data), tmp_path / "out")
    assert texts(tmp_path / "out") == documents
    broken = put(tmp_path / "b.jsonl", data + b"\n{broken")
    assert "b.jsonl, line 4 is no valid JSON" in refused(broken, tmp_path)
    latin = put(tmp_path / "c.jsonl", data + b'\n{"text": "\xe9"}')
    assert f"c.jsonl, line 4: byte {len(data) + 11} of the file (0xe9) is no UTF-8" in refused(latin, tmp_path)


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary"])
def test_parquet_by_row_groups(tmp_path: Path, kind: str) -> None:
    column = pa.array(["first", None, "third", "  ", "fifth"])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    pq.write_table(pa.table({"id": list(range(5)), "body": column}), tmp_path / "a.parquet", row_group_size=2)
    make(tmp_path / "a.parquet", tmp_path / "out", text_key="body")
    assert texts(tmp_path / "out") == ["first", "third", "fifth"]
    assert summary(tmp_path / "out")["skipped"] == {"empty": 2}


def test_a_hugging_face_dataset_on_disk(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"text": [f"row {number}" for number in range(25)], "id": range(25)})
    rows.save_to_disk(tmp_path / "saved", num_shards=2)
    make(tmp_path / "saved", tmp_path / "out")
    assert texts(tmp_path / "out") == [f"row {number}" for number in range(25)]
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "splits")
    message = refused(tmp_path / "splits", tmp_path)
    assert "is a Hugging Face DatasetDict; give one of its splits" in message
    assert f"{tmp_path / 'splits/test'}, {tmp_path / 'splits/train'}" in message
    (tmp_path / "saved/data-00001-of-00002.arrow").unlink()
    assert "lacks data-00001-of-00002.arrow" in refused(tmp_path / "saved", tmp_path)


def test_a_folder_is_read_in_sorted_order_without_hidden_files_and_chosen_by_patterns(tmp_path: Path) -> None:
    root = tmp_path / "in"
    for name in (
        "b/x.py",
        "a.txt",
        "b/y.txt",
        "c.md",
        ".git/config",
        "__pycache__/x.py",
        ".hidden",
        "site-packages/z.py",
    ):
        put(root / name, name.encode())
    make(root, tmp_path / "all")
    assert texts(tmp_path / "all") == ["a.txt", "c.md", "b/x.py", "b/y.txt", "site-packages/z.py"]
    make(root, tmp_path / "some", include=("*.py", "*.md"), exclude=("*/site-packages/*",))
    assert texts(tmp_path / "some") == ["c.md", "b/x.py"]
    make(root, tmp_path / "few", exclude=("b/*", "site-packages/*"))
    assert texts(tmp_path / "few") == ["a.txt", "c.md"]
    assert "no file found in" in refused(root, tmp_path, include=("*.rst",))


# ---- Encodings ----


def test_a_byte_order_mark_is_dropped_and_crlf_lines_are_lines(tmp_path: Path) -> None:
    # The mark once made the first record vanish without an error (in other systems).
    make(put(tmp_path / "b.jsonl", b'\xef\xbb\xbf{"text":"first"}\r\n{"text":"second"}'), tmp_path / "lines")
    assert texts(tmp_path / "lines") == ["first", "second"]
    assert summary(tmp_path / "lines")["read"] == 2
    make(put(tmp_path / "b.txt", b"\xef\xbb\xbftext\r\nmore"), tmp_path / "text")
    assert texts(tmp_path / "text") == ["text\r\nmore"]
    packed = gzip.compress(b'\xef\xbb\xbf{"text":"first"}\r\n')
    make(put(tmp_path / "c.jsonl.gz", packed), tmp_path / "packed")
    assert texts(tmp_path / "packed") == ["first"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf16_and_utf32_with_a_mark_are_decoded(tmp_path: Path, encoding: str) -> None:
    mark = "" if encoding in ("utf-16", "utf-32") else "\ufeff"
    make(put(tmp_path / "a.txt", (mark + "Grüße 👍").encode(encoding)), tmp_path / "out")
    assert texts(tmp_path / "out") == ["Grüße 👍"]


def test_text_that_cannot_be_decoded_is_named_with_its_byte(tmp_path: Path) -> None:
    latin = put(tmp_path / "latin.txt", "Grüße".encode("latin-1"))
    assert "latin.txt: byte 2 (0xfc) is no UTF-8: the file cannot be decoded" in refused(latin, tmp_path)
    marked = put(tmp_path / "marked.txt", b"\xef\xbb\xbfab\xff")
    assert "byte 5 (0xff)" in refused(marked, tmp_path)
    lines = put(tmp_path / "l.jsonl", b'{"text": "a"}\n{"text": "\xfc"}\n')
    assert "l.jsonl, line 2: byte 24 of the file (0xfc) is no UTF-8" in refused(lines, tmp_path)
    wide = put(tmp_path / "w.jsonl", '{"text": "a"}'.encode("utf-16"))
    assert "w.jsonl is UTF-16 by its byte order mark" in refused(wide, tmp_path)


def test_a_named_binary_file_is_an_error_and_one_in_a_folder_is_skipped_and_counted(tmp_path: Path) -> None:
    binary = put(tmp_path / "in/a.dat", b"abc\0def")
    put(tmp_path / "in/latin.txt", b"\xe9t\xe9")
    put(tmp_path / "in/empty.txt", b"")
    put(tmp_path / "in/text.txt", b"text")
    assert "a.dat: NUL at byte 3: the file is binary" in refused(binary, tmp_path)
    result = make(tmp_path / "in", tmp_path / "out")
    counts = summary(tmp_path / "out")
    assert counts["skipped"] == {"binary": 1, "not text": 1, "empty": 1}
    assert counts["read"] == 4
    assert "latin.txt: byte 0 (0xe9) is no UTF-8" in counts["examples"]["not text"][0]
    assert "documents read 4 = written 1 + skipped 1 binary, 1 empty, 1 not text" in result.summary()


@pytest.mark.parametrize("workers", [1, 2])
def test_lone_surrogates_become_replacement_characters_and_pairs_characters(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One of them once killed a build after hours (in other systems).
    monkeypatch.setattr("fivefold.data.decompress.BLOCK", 40)
    source = put(
        tmp_path / "s.jsonl", b'{"text":"ok \\ud800 end"}\n{"text":"\\ud83d\\udc4d"}\n{"text":"\\udc4d\\ud83d"}\n'
    )
    make(source, tmp_path / "out", workers=workers)
    assert texts(tmp_path / "out") == ["ok \ufffd end", "👍", "\ufffd\ufffd"]
    assert summary(tmp_path / "out")["replaced_surrogates"] == 3


# ---- Empty documents ----


@pytest.mark.parametrize(
    "data",
    [
        b'{"text":""}\n{"text":"abc"}\n{"text":"  "}\n{"text":""}\n',
        b'{"text":"abc"}\n{"text":""}\n',
        b'{"text":""}\n{"text":"abc"}\n',
        b'{"text":null}\n{"text":"abc"}',
    ],
)
def test_empty_documents_are_skipped_and_counted_wherever_they_stand(tmp_path: Path, data: bytes) -> None:
    # An empty first document once broke the step that appends the end token (in another system).
    make(put(tmp_path / "e.jsonl", data), tmp_path / "out")
    tokens = TokenSet.open(tmp_path / "out")
    assert texts(tmp_path / "out") == ["abc"]
    assert summary(tmp_path / "out")["skipped"] == {"empty": data.count(b"text") - 1}
    assert tokens.index.lengths.tolist() == [tokens.tokens]
    assert tokens.index.boundaries.tolist() == [0, 1]
    assert tokens.bin.stat().st_size == tokens.tokens * tokens.index.dtype.itemsize
    assert int(tokens.read(tokens.tokens - 1, 1)[0]) == tokens.eod


def test_nothing_but_empty_documents_is_one_message(tmp_path: Path) -> None:
    source = put(tmp_path / "e.jsonl", b'{"text":""}\n{"text":" \\n\\t"}\n')
    assert "no document to write: 2 read, skipped 2 empty; nothing was written" in refused(source, tmp_path)
    assert "no document to write: 0 read" in refused(put(tmp_path / "n.jsonl", b"\n\n"), tmp_path)


# ---- Broken input ----


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    assert "nothing-here.txt does not exist" in refused(tmp_path / "nothing-here.txt", tmp_path)
    assert "void.txt is empty (0 bytes)" in refused(put(tmp_path / "void.txt", b""), tmp_path)
    (tmp_path / "hollow").mkdir()
    assert "no file found in" in refused(tmp_path / "hollow", tmp_path)
    assert "no input" in refused([], tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "is no valid JSON: Unterminated string"),
        (b'{"text": "nul \0"}', "is no valid JSON: Invalid control character"),
        (b'["text"]', "is list, not an object with a 'text' key"),
        (b'{"body": "x", "id": 3}', "has no key 'text'; its keys are body, id; name one with --text-key"),
        (b"{}", "has no key 'text'; its keys are none"),
        (b'{"text": 5}', "'text' is int, not a text"),
        (b'{"text": ["a"]}', "'text' is list, not a text"),
        (b"[" * 100_000, "is nested too deeply|is no valid JSON"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, message: str) -> None:
    source = put(tmp_path / "a.jsonl", b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    found = refused(source, tmp_path)
    assert "a.jsonl, line 3" in found
    assert any(each in found for each in message.split("|"))


@pytest.mark.parametrize("ending", ["gz", "zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_compressed_file_that_is_cut_short_or_damaged_is_named(tmp_path: Path, name: str, ending: str) -> None:
    data = b"".join(b'{"text": "line %d"}\n' % (number * 7919) for number in range(5000))
    packed = gzip.compress(data) if ending == "gz" else zstandard.ZstdCompressor(write_checksum=True).compress(data)
    for cut in (len(packed) - 1, len(packed) // 2, 10):
        source = put(tmp_path / f"{name}.{ending}", packed[:cut])
        assert f"{name}.{ending} is cut short or damaged after {cut} of its bytes" in refused(source, tmp_path)
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 0x55
    assert "is cut short or damaged" in refused(put(source, bytes(flipped)), tmp_path)
    assert "is cut short or damaged" in refused(put(source, b"not compressed at all"), tmp_path)


def test_broken_tables_and_missing_columns_are_named(tmp_path: Path) -> None:
    table = pa.table({"body": ["a", "b"], "number": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    assert "a.parquet has no column 'text'; its columns are body, number" in refused(tmp_path / "a.parquet", tmp_path)
    assert "column 'number' holds int64, not text" in refused(tmp_path / "a.parquet", tmp_path, text_key="number")
    cut = put(tmp_path / "cut.parquet", whole[:-5])
    assert "cut.parquet cannot be read as Parquet" in refused(cut, tmp_path, text_key="body")
    damaged = put(tmp_path / "damaged.parquet", whole[:4] + b"\xff" * 30 + whole[34:])
    assert "damaged.parquet, row group 0: cannot be read" in refused(damaged, tmp_path, text_key="body")


def test_a_cut_arrow_file_is_named(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["some text"] * 5000}).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    put(file, file.read_bytes()[: file.stat().st_size // 2])
    assert "cannot be read as an Arrow stream" in refused(tmp_path / "saved", tmp_path)
