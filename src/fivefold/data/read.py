"""From input files to documents, in two halves: blocks, cheap to cut in the main process, and their documents.

A block is a piece of the input of a megabyte or so (some small text files, some lines, a row group): what one worker
handles at a time. Blocks come in a fixed order and carry references or raw bytes; decoding, parsing and checking happen
in `documents`, in the worker. Every fault of the input is a UserError that names the file and the place.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fivefold.data.decompress import read_counted, read_decompressed
from fivefold.errors import UserError

BOMS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16: its first two bytes are that of UTF-16
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


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
