"""From input files to documents, in two halves: blocks, cheap to cut in the main process, and their documents.

A block is a piece of the input of a megabyte or so (some small text files, some lines, a row group): what one worker
handles at a time. Blocks come in a fixed order and carry references or raw bytes; decoding, parsing and checking happen
in `documents`, in the worker. Every fault of the input is a UserError that names the file and the place.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import zstandard

from fivefold.errors import UserError

BLOCK = 1 << 20
"""Bytes that a block aims at."""
BOMS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16: its first two bytes are that of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Skipped:
    """Something in the input that is no document, and why."""

    reason: str
    where: str


Item = str | Skipped


class Block(Protocol):
    """A piece of the input."""

    @property
    def size(self) -> int:
        """Bytes of the input files that it stands for: what the progress bar counts."""
        ...

    def documents(self, text_key: str) -> Iterator[Item]:
        """The texts in it, in order. Raises UserError naming file and place."""
        ...


# ---- text: a file is a document ----


@dataclass(frozen=True)
class TextFile:
    """A file to be read as one document."""

    path: str
    size: int
    named: bool
    """Whether the user named it, rather than a folder around it: then a file that is not text is an error."""


@dataclass(frozen=True)
class TextFiles:
    """Some text files, each one document."""

    files: tuple[TextFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def documents(self, text_key: str) -> Iterator[Item]:
        for file in self.files:
            yield text_document(file)


def text_document(file: TextFile) -> Item:
    """The text of a file, decoded by its byte order mark or as UTF-8."""
    data = b"".join(read_decompressed(file.path))
    bom = next((mark for mark in BOMS if data.startswith(mark)), b"")
    encoding = BOMS.get(bom, "utf-8")
    if encoding == "utf-8" and (at := data.find(b"\0")) >= 0:
        fault = Skipped("binary", f"{file.path}: NUL at byte {at}")
    else:
        try:
            return data[len(bom) :].decode("utf-8") if encoding == "utf-8" else data.decode(encoding)
        except UnicodeDecodeError as error:
            at = error.start + (len(bom) if encoding == "utf-8" else 0)
            fault = Skipped("not text", f"{file.path}: byte {at} (0x{data[at]:02x}) is no {encoding.upper()}")
    if file.named:
        kind = "is binary" if fault.reason == "binary" else "cannot be decoded as text"
        advice = "leave it out" if fault.reason == "binary" else "convert it to UTF-8"
        raise UserError(f"{fault.where}: the file {kind}; {advice}")
    return fault


# ---- JSON lines ----


@dataclass(frozen=True)
class JsonLines:
    """Some whole lines of a JSONL file."""

    path: str
    first_line: int
    offset: int
    """Where `data` begins, in bytes of the (decompressed) file."""
    data: bytes
    size: int

    def documents(self, text_key: str) -> Iterator[Item]:
        for number, line in enumerate(self.data.split(b"\n"), start=self.first_line):
            if line.strip():
                yield self._document(number, line, text_key)

    def _document(self, number: int, line: bytes, text_key: str) -> Item:
        where = f"{self.path}, line {number}"
        try:
            record = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            at = (
                self.offset
                + sum(map(len, self.data.split(b"\n")[: number - self.first_line]))
                + number
                - self.first_line
            )
            raise UserError(
                f"{where}: byte {at + error.start} of the file (0x{line[error.start]:02x}) is no UTF-8"
            ) from None
        except ValueError as error:
            raise UserError(f"{where} is no valid JSON: {error}; the line begins {line[:60]!r}") from None
        except RecursionError:
            raise UserError(f"{where} is nested too deeply to be read as JSON") from None
        if not isinstance(record, dict):
            raise UserError(f"{where} is {type(record).__name__}, not an object with a {text_key!r} key")
        return checked_text(record.get(text_key, Missing), where, text_key, list(record))


class Missing:
    """Stands for a key that is not there."""


def checked_text(value: Any, where: str, text_key: str, keys: list[str]) -> Item:
    """`value` if it is a text; nothing is skipped as empty, all else is refused."""
    if isinstance(value, str):
        return value
    if value is Missing:
        raise UserError(
            f"{where} has no key {text_key!r}; its keys are {', '.join(keys) or 'none'}; name one with --text-key"
        )
    if value is None:
        return Skipped("empty", where)
    raise UserError(f"{where}: {text_key!r} is {type(value).__name__}, not a text")


def json_blocks(path: str) -> Iterator[JsonLines]:
    """Cut a JSONL file at line ends. A UTF-8 byte order mark is dropped."""
    unfinished: list[bytes] = []
    line, offset, counted = 1, 0, 0
    for number, (chunk, consumed) in enumerate(read_counted(path)):
        body = chunk if number else without_bom(path, chunk)
        offset += len(chunk) - len(body)
        end = body.rfind(b"\n") + 1
        unfinished.append(body[:end] if end else body)
        if not end:
            continue
        data = b"".join(unfinished)
        yield JsonLines(path, line, offset, data, consumed - counted)
        line, offset, counted = line + data.count(b"\n"), offset + len(data), consumed
        unfinished = [body[end:]]
    if data := b"".join(unfinished):
        yield JsonLines(path, line, offset, data, Path(path).stat().st_size - counted)


def without_bom(path: str, head: bytes) -> bytes:
    """The first bytes of a JSONL file without a UTF-8 mark; other encodings are refused."""
    mark = next((mark for mark in BOMS if head.startswith(mark)), b"")
    if BOMS.get(mark, "utf-8") != "utf-8":
        raise UserError(
            f"{path} is {BOMS[mark].upper()} by its byte order mark; JSON lines are read as UTF-8: convert the file"
        )
    return head[len(mark) :]


# ---- Parquet and Arrow ----


@dataclass(frozen=True)
class ParquetGroup:
    """One row group of a Parquet file."""

    path: str
    group: int
    first_row: int
    size: int

    def documents(self, text_key: str) -> Iterator[Item]:
        import pyarrow.parquet as pq

        row = self.first_row
        try:
            with pq.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=1024, row_groups=[self.group], columns=[text_key]):
                    yield from column_documents(batch.column(0), self.path, row, text_key)
                    row += batch.num_rows
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path}, row group {self.group}: cannot be read: {error}") from None


@dataclass(frozen=True)
class ArrowBatch:
    """One record batch of a Hugging Face dataset on disk: the text column, as an Arrow stream."""

    path: str
    first_row: int
    data: bytes
    size: int

    def documents(self, text_key: str) -> Iterator[Item]:
        import pyarrow as pa

        row = self.first_row
        for batch in pa.ipc.open_stream(self.data):
            yield from column_documents(batch.column(0), self.path, row, text_key)
            row += batch.num_rows


def column_documents(column: Any, path: str, first_row: int, text_key: str) -> Iterator[Item]:
    """The texts of a column; a null is an empty document."""
    for row, value in enumerate(column, start=first_row):
        where = f"{path}, row {row}"
        try:
            yield checked_text(value.as_py(), where, text_key, [])
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: byte {error.start} of the text is no UTF-8") from None


def check_column(schema: Any, path: str, text_key: str) -> None:
    """Refuse a table without a text column of that name, with the columns it has."""
    import pyarrow as pa

    names = schema.names
    if text_key not in names:
        raise UserError(
            f"{path} has no column {text_key!r}; its columns are {', '.join(names)}; name one with --text-key"
        )
    kind = schema.field(text_key).type
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (
        pa.types.is_string(text)
        or pa.types.is_large_string(text)
        or pa.types.is_string_view(text)
        or pa.types.is_null(text)
    ):
        raise UserError(f"{path}: column {text_key!r} holds {kind}, not text")


def parquet_blocks(path: str, text_key: str) -> Iterator[ParquetGroup]:
    """The row groups of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} cannot be read as Parquet ({error}): it is cut short or something else") from None
    check_column(schema, path, text_key)
    row, groups = 0, max(1, metadata.num_row_groups)
    for group in range(metadata.num_row_groups):
        yield ParquetGroup(path, group, row, Path(path).stat().st_size // groups)
        row += metadata.row_group(group).num_rows


def arrow_blocks(path: str, text_key: str) -> Iterator[ArrowBatch]:
    """The record batches of an Arrow stream file, mapped: one is in memory at a time."""
    import pyarrow as pa

    try:
        with pa.memory_map(path) as file, pa.ipc.open_stream(file) as stream:
            check_column(stream.schema, path, text_key)
            row, counted = 0, 0
            for batch in stream:
                column = pa.record_batch([batch.column(text_key)], names=[text_key])
                sink = io.BytesIO()
                with pa.ipc.new_stream(sink, column.schema) as writer:
                    writer.write_batch(column)
                yield ArrowBatch(path, row, sink.getvalue(), file.tell() - counted)
                row, counted = row + batch.num_rows, file.tell()
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{path} cannot be read as an Arrow stream ({error}): it is cut short or something else"
        ) from None


# ---- bytes ----


def read_decompressed(path: str) -> Iterator[bytes]:
    """The contents of a file, .gz and .zst decompressed, in chunks."""
    for chunk, _ in read_counted(path):
        yield chunk


def read_counted(path: str) -> Iterator[tuple[bytes, int]]:
    """As `read_decompressed`, with the bytes of the file read so far. Raises UserError for a file cut short."""
    with Path(path).open("rb") as raw:
        try:
            for chunk in decompressed(path, raw):
                yield chunk, raw.tell()
        except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
            raise UserError(f"{path} is cut short or damaged after {raw.tell()} of its bytes: {error}") from None


def decompressed(path: str, raw: BinaryIO) -> Iterator[bytes]:
    """Chunks of about BLOCK bytes of an open file's contents."""
    if path.endswith(".gz"):
        with gzip.GzipFile(fileobj=raw) as file:
            while chunk := file.read(BLOCK):
                yield chunk
    elif path.endswith(".zst"):
        yield from zstd_chunks(raw)
    else:
        while chunk := raw.read(BLOCK):
            yield chunk


def zstd_chunks(raw: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames of a zstd file. The library's readers pass over a cut end in silence, this does not."""
    context = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = context.decompressobj()
    fresh = True
    while data := raw.read(BLOCK // 4):
        while data:
            if out := frame.decompress(data):
                yield out
            fresh = False
            data = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame, fresh = context.decompressobj(), True
    if not fresh:
        raise EOFError("the last zstd frame has no end")
