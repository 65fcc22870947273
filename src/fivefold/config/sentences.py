"""The sentences that stand under the fields of `run.py`, read from its source.

Python keeps no docstring of a field, so they are parsed when a page or a template is written, and cost a run nothing.
"""

from __future__ import annotations

import ast
from functools import cache
from inspect import cleandoc
from pathlib import Path

from fivefold.config import run
from fivefold.config.run import Section


@cache
def _all() -> dict[str, dict[str, str]]:
    """For each class of run.py the sentence of each field."""
    tree = ast.parse(Path(run.__file__).read_text(encoding="utf-8"))
    return {node.name: _of_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    sentences = {}
    for statement, below in zip(node.body, node.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    sentences[statement.target.id] = " ".join(text.split())
    return sentences


def field_sentences(section: type[Section]) -> dict[str, str]:
    """The sentence of each field by the key that stands in the run file; a section's is that of its class."""
    own = _all()[section.__name__]
    return {
        info.alias or name: own.get(name) or class_sentence(info.annotation)
        for name, info in section.model_fields.items()
    }


def class_sentence(section: object) -> str:
    """What a section is for."""
    return cleandoc(getattr(section, "__doc__", None) or "")
