"""Small token sets and corpora for the tests of this room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fivefold.data.build import BuildResult, build
from fivefold.data.recipe import BuildOptions
from fivefold.data.tokens import TokenSet
from fivefold.data.writer import TokenWriter

EOD = 0


def write_set(folder: Path, lengths: list[int], vocab: int = 1003) -> TokenSet:
    """Documents of these lengths; token i of the set is 1 + i % (vocab - 1), the last of a document EOD."""
    writer = TokenWriter(folder, vocab, EOD)
    start = 0
    for length in lengths:
        tokens = 1 + np.arange(start, start + length) % (vocab - 1)
        tokens[-1] = EOD
        writer.write(tokens, np.array([length]))
        start += length
    writer.close(role="train")
    return TokenSet.open(folder)


def make(inputs: Path | list[Path], out: Path, **options: Any) -> BuildResult:
    """Build with a small tokenizer and without a validation part, unless told otherwise."""
    settings: dict[str, Any] = {"val_fraction": 0.0, "workers": 1, "progress": False, **options}
    if settings.get("tokenizer") is None:
        settings.setdefault("train_tokenizer", 300)
    return build(inputs if isinstance(inputs, list) else [inputs], out, BuildOptions(**settings))


def texts(path: Path) -> list[str]:
    """The documents of a built set, decoded."""
    from fivefold.data.tokenizer import Tokenizer

    tokens, tokenizer = TokenSet.open(path), Tokenizer.load(path)
    ends = [*(int(each) for each in np.asarray(tokens.starts[:])[1:]), tokens.tokens]
    starts = [0, *ends[:-1]]
    return [tokenizer.decode(tokens.read(start, end - start)) for start, end in zip(starts, ends, strict=True)]
