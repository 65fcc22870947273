"""What a build was made from: inputs, options and tokenizer, so that a second build knows whether it is the same.

The recipe lies in dataset.json, the list of inputs in inputs.jsonl beside it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from fivefold.data.inputs import Input
from fivefold.data.writer import FORMAT
from fivefold.errors import UserError

INPUTS = "inputs.jsonl"
SHOWN = 3  # differing inputs that a message lists


@dataclass(frozen=True)
class BuildOptions:
    """What `fivefold data build` can be told."""

    train_tokenizer: int | None = None
    """Train a byte-level BPE tokenizer of this many tokens on a sample of the inputs; this or `tokenizer`."""
    tokenizer: str | None = None
    """A tokenizer.json, a folder that holds one, or an id on the Hugging Face hub."""
    end_token: str | None = None
    """Text of the end-of-document token, where the tokenizer's files name none."""
    val_fraction: float = 0.01
    """Share of the documents to hold out for validation, chosen by a hash of their text; 0 for none."""
    text_key: str = "text"
    """Key (JSONL) or column (Parquet, Arrow) of the text."""
    dedup: Literal["none", "exact"] = "none"
    """`exact` keeps only the first of documents with the same text; takes about 100 bytes of memory a document."""
    include: tuple[str, ...] = ()
    """In folders, take only files that match one of these patterns."""
    exclude: tuple[str, ...] = ()
    """In folders, leave out files that match one of these patterns."""
    seed: int = 0
    """Of the hash that chooses what is held out."""
    workers: int | None = None
    """Processes; null is one a core. The result is the same for any number."""
    overwrite: bool = False
    """Replace an existing output that was built from something else."""
    progress: bool = True
    """Show a progress bar on standard error, if that is a terminal."""

    def check(self) -> None:
        """Raises UserError for values that make no sense."""
        if (self.train_tokenizer is None) == (self.tokenizer is None):
            raise UserError("give one of --train-tokenizer SIZE (such as 32000) and --tokenizer FILE|DIR|HUB_ID")
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"--val-fraction {self.val_fraction} is not a share: it must be at least 0 and below 1")
        if self.workers is not None and self.workers < 1:
            raise UserError(f"--workers {self.workers}: at least one is needed")
        if self.dedup not in ("none", "exact"):
            raise UserError(f"--dedup {self.dedup}: known are none and exact")


NO_INFLUENCE = ("workers", "overwrite", "progress", "tokenizer")


def make_recipe(inputs: Sequence[Input], options: BuildOptions, tokenizer: str | None) -> dict[str, Any]:
    """What decides the output. `tokenizer` is the contents of the one given, None if it is to be trained."""
    recipe = {key: value for key, value in asdict(options).items() if key not in NO_INFLUENCE}
    recipe |= {"include": list(options.include), "exclude": list(options.exclude)}
    recipe["tokenizer"] = None if tokenizer is None else digest(tokenizer)
    recipe["inputs"] = digest(input_list(inputs))
    recipe["format"] = FORMAT
    return recipe


def input_list(inputs: Sequence[Input]) -> str:
    """The contents of inputs.jsonl: path, size and time of change (ns) of each input, one a line."""
    lines = ([str(Path(each.path).absolute()), each.size, each.modified_ns] for each in inputs)
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def differences(old: dict[str, Any], new: dict[str, Any], old_folder: Path, inputs: Sequence[Input]) -> list[str]:
    """What distinguishes two recipes, in words."""
    found = [
        f"{key} was {json.dumps(old.get(key))}, now {json.dumps(new[key])}"
        for key in new
        if key != "inputs" and old.get(key) != new[key]
    ]
    if old.get("inputs") != new["inputs"]:
        found += input_differences(old_folder / INPUTS, inputs)
    return found


def input_differences(listing: Path, inputs: Sequence[Input]) -> list[str]:
    """Which inputs are new, gone or changed since `listing` was written."""
    try:
        before = {path: rest for path, *rest in map(json.loads, listing.read_text(encoding="utf-8").splitlines())}
    except (OSError, ValueError):
        return ["the inputs are others"]
    now = {path: rest for path, *rest in map(json.loads, input_list(inputs).splitlines())}
    groups = {
        "new": [path for path in now if path not in before],
        "gone": [path for path in before if path not in now],
        "changed": [path for path in now if path in before and before[path] != now[path]],
    }
    found = [f"{len(paths)} input(s) {kind}: {shorten(paths)}" for kind, paths in groups.items() if paths]
    return found or ["the inputs come in another order"]


def shorten(paths: Sequence[str]) -> str:
    """The first few of many."""
    return ", ".join(paths[:SHOWN]) + (", ..." if len(paths) > SHOWN else "")


def digest(text: str) -> str:
    """128-bit hash, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogateescape"))
