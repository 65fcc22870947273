"""The run file that `fivefold init` writes: its keys with their sentences, and values that train a small model on text.

The words and the defaults come from the classes, so the file is never behind them; here are only the values that an
example wants otherwise.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from fivefold.config.keys import fields, item_type, section_in
from fivefold.config.reference import plain_text
from fivefold.config.run import Run, Section
from fivefold.config.sentences import class_sentence, field_sentences

COMMENT_COLUMN = 32
WIDTH = 120

EXAMPLE: dict[str, Any] = {
    "name": "tiny",
    "steps": 300,
    "model.preset": "tiny-llama",
    "data.train": [{"path": "data/stdlib", "weight": 1.0}],
    "data.validation": [{"name": "stdlib", "path": "data/stdlib-val"}],
    "data.seq_len": 256,
    "validate.tokens": 50_000,
    "batch.global_size": 8,
    "optim.lr": 1.5e-3,
}
"""What the example says otherwise than the defaults."""

MODEL_KEYS = ("preset", "from", "weights", "vocab")
"""Of the architecture's many fields, those that a file with a preset wants; the others are the preset's."""

OF_EXPERTS = ("loss", "routing")
"""Sections that the example, a dense model, has no use for; a line says where they are explained."""

HEAD = """\
# A run of Fivefold. `fivefold check run.yaml` tells what is wrong with it, `fivefold train run.yaml` runs it.
# Every key is also a flag by its dotted name (--optim.lr 1e-3), and every line with a default may be left out.
"""


def template() -> str:
    """A run file with comments, as YAML; it loads and breaks no rule."""
    return HEAD + "\n" + "\n".join(_lines(Run, "")) + "\n"


def _lines(section: type[Section], name: str) -> Iterator[str]:
    sentences = field_sentences(section)
    indent = "  " * bool(name)
    for key, info in fields(section).items():
        dotted = f"{name}.{key}" if name else key
        if dotted in OF_EXPERTS or (name == "model" and key not in MODEL_KEYS):
            continue
        inner = section_in(info.annotation)
        if inner is not None:
            yield ""
            yield from _commented(f"{key}:", class_sentence(inner))
            yield from _lines(inner, dotted)
            continue
        value = EXAMPLE.get(dotted, None if info.is_required() else info.get_default(call_default_factory=True))
        item = section_in(item_type(info.annotation))
        if item is not None and value:
            yield from _commented(f"{indent}{key}:", sentences[key])
            yield from _items(item, value, indent)
        else:
            yield from _commented(f"{indent}{key}: {plain_text(value)}", sentences[key])
    if name == "model":
        yield "  # Any other field of the architecture (layers, context, ...) can be given here, over the preset's."
    if not name:
        yield ""
        yield f"# {' and '.join(OF_EXPERTS)} are about experts and predicting more tokens (docs/run-file.md)."


def _items(section: type[Section], items: list[dict[str, Any]], indent: str) -> Iterator[str]:
    sentences = field_sentences(section)
    for item in items:
        for number, (key, value) in enumerate(item.items()):
            yield from _commented(f"{indent}  {' ' if number else '-'} {key}: {plain_text(value)}", sentences[key])


def _commented(line: str, sentence: str) -> Iterator[str]:
    """The line with its sentence as a comment beside it, wrapped below itself if it is long."""
    column = max(COMMENT_COLUMN, len(line) + 2)
    first, *more = textwrap.wrap(sentence, WIDTH - column - 2)
    yield f"{line:<{column}}# {first}"
    for text in more:
        yield f"{'':<{column}}# {text}"
