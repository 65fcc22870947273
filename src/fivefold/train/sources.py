"""The data of a run, opened and checked before the first step: token sets, the tokenizer, and what they are.

What is found here fills in what the run file left open (the vocabulary) and becomes the data's identity, which a
checkpoint keeps so that a resumed run reads the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from fivefold.config.run import Run
from fivefold.data.loader import check_validation_set
from fivefold.data.source import TokenSource, open_source
from fivefold.data.tokenizer import Tokenizer
from fivefold.data.tokens import TokenSet
from fivefold.data.windows import check_has_targets, check_long_enough
from fivefold.errors import UserError


@dataclass(frozen=True)
class RunData:
    """What a run reads."""

    train: list[TokenSource]
    validation: dict[str, TokenSource]
    tokenizer: Tokenizer | None
    """None if the data carries none and the run file names none; then nothing can be generated or exported."""

    @cached_property
    def contents(self) -> list[dict[str, Any]]:
        """What each training source holds. Read once: an index without a checksum is gigabytes for large data."""
        return [{"tokens": each.tokens, "documents": len(each.starts), **_content(each)} for each in self.train]


def open_data(run: Run) -> RunData:
    """Open everything that `run.data` names. Raises UserError, naming the file."""
    train = [open_source(source.path) for source in run.data.train]
    validation = {each.name: open_source(each.path) for each in run.data.validation}
    return RunData(train, validation, _tokenizer(run, [*train, *validation.values()]))


def vocabulary(run: Run, data: RunData) -> int:
    """The number of embedding rows. Raises UserError if it cannot be known."""
    if run.model.vocab != "auto":
        return run.model.vocab
    if data.tokenizer is None:
        raise UserError(
            f"model.vocab is auto, but {data.train[0].name} carries no tokenizer to take it from; set model.vocab to a "
            "number, or data.tokenizer to the tokenizer's file or folder"
        )
    return data.tokenizer.vocab_size


def check_vocabulary(data: RunData, vocab: int) -> None:
    """Look for token ids that the model does not have. Raises UserError with the first one."""
    for source in [*data.train, *data.validation.values()]:
        source.check_vocabulary(vocab)


def check_lengths(run: Run, data: RunData) -> None:
    """Refuse a set that is too short, or has nothing to learn or to validate. Raises UserError with the numbers."""
    for source in data.train:
        check_long_enough(source, run.data.seq_len)
        check_has_targets(source, run.data.document_mask)
    for source in data.validation.values() if run.validation.every is not None else ():
        check_validation_set(source, run.data.seq_len, run.validation.tokens, run.data.document_mask)


def identity(run: Run, data: RunData) -> list[dict[str, Any]]:
    """What the training data is, wherever it lies: one entry a source."""
    return [{**content, "weight": entry.weight} for content, entry in zip(data.contents, run.data.train, strict=True)]


def _content(source: TokenSource) -> dict[str, str]:
    """A checksum of the tokens where one is kept, else of what is cheap to read: the index."""
    if not isinstance(source, TokenSet):
        return {"source": source.name}
    if source.meta and source.bin.name in source.meta["checksums"]:
        return {"xxh3": source.meta["checksums"][source.bin.name]}
    digest = xxhash.xxh3_64()
    with source.idx.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"index_xxh3": digest.hexdigest()}


def _tokenizer(run: Run, sources: list[TokenSource]) -> Tokenizer | None:
    if run.data.tokenizer != "auto":
        return Tokenizer.load(run.data.tokenizer)
    folders = [source.tokenizer for source in sources if isinstance(source, TokenSet) and source.tokenizer]
    loaded = [Tokenizer.load(folder) for folder in folders]
    for folder, tokenizer in zip(folders[1:], loaded[1:], strict=True):
        if tokenizer.to_json() != loaded[0].to_json():
            raise UserError(
                f"{folders[0]} and {folder} were built with different tokenizers, so their token ids mean different "
                "text; build one of them again with the other's (--tokenizer)"
            )
    return loaded[0] if loaded else None


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer that a run's folder keeps. Raises UserError if the run has none."""
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"{folder} has no tokenizer: its data carried none; train with data.tokenizer set to its file or folder"
        )
    return Tokenizer.load(folder)
