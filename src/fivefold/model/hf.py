"""Hugging Face in and out: what a family must say to be read from and written to Hugging Face's files.

The built-in families say it in `hf_llama.py`, `hf_bloom.py` and `hf_deepseek.py`. Reading the files is in
`hf_import.py`, writing them in `hf_export.py`; both know no architecture. A family of your own brings an adaptor of
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.config.huggingface import TokenIds, hf_config
from fivefold.config.run import Model
from fivefold.model.hf_entry import AnyEntry, Entry, Shape, same

__all__ = ["AnyEntry", "Entry", "HFAdaptor", "Shape", "same"]


def _nothing(model: Model, names: Collection[str]) -> set[str]:
    return set()


@dataclass(frozen=True)
class HFAdaptor:
    """What a family must say to be read from and written to Hugging Face's files."""

    entries: Callable[[Model], Sequence[AnyEntry]]
    """One entry a parameter, and a buffer that files hold, in the model's order; none for a tied head."""
    embedding: str
    """The file's name of the token embedding."""
    head: str
    """The file's name of the output head, which a tied model leaves out."""
    body: str = ""
    """Prefix of all names but the head's, which files saved from the body alone leave out."""
    ignored: str = r"(?!)"
    """A regular expression of names that some files hold and that are no weights, such as rotary frequencies."""
    config: Callable[[Model, TokenIds, str], dict[str, Any]] = hf_config
    """The config.json of a model; the string is the weights' dtype, such as "float32"."""
    other_forms: Sequence[Callable[[Model], Sequence[AnyEntry]]] = ()
    """As `entries`, for files that hold the same weights otherwise, which are read too and never written."""
    left_out: Callable[[Model, Collection[str]], set[str]] = _nothing
    """Of the names in the files, those of parts that the model does without, such as multi-token prediction."""
