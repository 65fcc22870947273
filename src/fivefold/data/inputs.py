"""What the user's paths stand for: files found in folders, each with the way it is read, in a fixed order.

Here too: the list of (path, size, time) that says later whether an input has changed.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fivefold.data.decompress import BLOCK, COMPRESSED
from fivefold.data.read import Block, TextFile, TextFiles, json_blocks
from fivefold.data.tables import arrow_blocks, parquet_blocks
from fivefold.errors import UserError

MOST_FILES = 256  # text files in one block
Kind = Literal["text", "jsonl", "parquet", "arrow"]


@dataclass(frozen=True)
class Input:
    """A file to read."""

    path: str
    kind: Kind
    size: int
    modified_ns: int
    named: bool
    """Whether the user named the file itself."""


def find_inputs(paths: Sequence[str | Path], include: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Input]:
    """All files that `paths` stand for: files as given, folders recursively and sorted.

    In a folder, hidden files and folders and __pycache__ are left out, and so is what does not match one of `include`
    (if given) or matches one of `exclude`. These are shell patterns in which * also crosses folders, held against the
    path inside the folder, with and without the folder's own name. Raises UserError for what is missing or empty.
    """
    if not paths:
        raise UserError("no input: give files or folders of text, JSONL or Parquet")
    found: dict[str, Input] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"input {path} does not exist")
        some = _in_folder(path, include, exclude) if path.is_dir() else [_named_file(path)]
        found.update((each.path, each) for each in some if each.path not in found)
    if not found:
        limits = f" (include {list(include)}, exclude {list(exclude)})" if include or exclude else ""
        raise UserError(f"no file found in {', '.join(map(str, paths))}{limits}")
    return list(found.values())


def _named_file(path: Path) -> Input:
    each = _input(path, named=True)
    if each.size == 0:
        raise UserError(f"input {path} is empty (0 bytes)")
    return each


def _input(path: Path, named: bool = False, kind: Kind | None = None) -> Input:
    status = path.stat()
    return Input(str(path), kind or kind_of(path), status.st_size, status.st_mtime_ns, named)


def kind_of(path: Path) -> Kind:
    """How a file is read, by its name; a .json file is JSON lines if its first line is an object, else a text."""
    name = path.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(".arrow"):
        return "arrow"
    if path.name.lower().endswith(".json"):
        with path.open("rb") as file:
            line = file.readline(BLOCK).removeprefix(b"\xef\xbb\xbf")
        try:
            return "jsonl" if isinstance(json.loads(line), dict) else "text"
        except ValueError:
            return "text"
    return "text"


def _in_folder(root: Path, include: Sequence[str], exclude: Sequence[str]) -> Iterator[Input]:
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        if "dataset_dict.json" in files:
            splits = sorted(name for name in folders if (here / name / "state.json").is_file())
            choices = ", ".join(str(here / name) for name in splits)
            raise UserError(f"{here} is a Hugging Face DatasetDict; give one of its splits: {choices}")
        if "state.json" in files and "dataset_info.json" in files:
            folders.clear()
            yield from _saved_dataset(here)
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(files):
            path = here / name
            if (
                not name.startswith(".")
                and path.is_file()
                and _wanted(path.relative_to(root), root.resolve().name, include, exclude)
            ):
                yield _input(path)


def _wanted(inside: Path, root: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    forms = inside.as_posix(), f"{root}/{inside.as_posix()}"

    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(form, pattern) for pattern in patterns for form in forms)

    return (not include or matches(include)) and not matches(exclude)


def _saved_dataset(folder: Path) -> Iterator[Input]:
    """The Arrow files of a folder that `Dataset.save_to_disk` wrote, in their order."""
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [entry["filename"] for entry in state["_data_files"]]
        indices = state.get("_indices_data_files")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / 'state.json'} is not that of a Hugging Face dataset ({error!r})") from None
    if indices:
        raise UserError(f"{folder} is a selection of rows by an index; save it after dataset.flatten_indices()")
    for name in names:
        if not (folder / name).is_file():
            raise UserError(f"{folder} lacks {name}, which its state.json lists")
        yield _input(folder / name, kind="arrow")


def cut_blocks(inputs: Sequence[Input], text_key: str) -> Iterator[Block]:
    """The blocks of all inputs, in order; small text files that follow each other share one."""
    texts: list[TextFile] = []
    gathered = 0
    for each in inputs:
        if each.kind == "text":
            texts.append(TextFile(each.path, each.size, each.named))
            gathered += each.size
            if gathered < BLOCK and len(texts) < MOST_FILES:
                continue
        if texts:
            yield TextFiles(tuple(texts))
            texts, gathered = [], 0
        if each.kind == "jsonl":
            yield from json_blocks(each.path)
        elif each.kind == "parquet":
            yield from parquet_blocks(each.path, text_key)
        elif each.kind == "arrow":
            yield from arrow_blocks(each.path, text_key)
    if texts:
        yield TextFiles(tuple(texts))
