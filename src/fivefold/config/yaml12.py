"""YAML 1.2 text to plain values and back, remembering where each value stood.

`3e-4`, `2e12` and `15e9` are numbers; `off`, `yes`, `1f1b` and dates are text, as the standard says and as most readers
do not. Every value keeps its line, so that a later complaint can name it. Knows nothing of the run file.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.representer import SafeRepresenter

from fivefold.errors import UserError

MOST_VALUES = 100_000
"""More values than any run file has: where aliases that multiply each other are stopped."""

PLAIN_WORD = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+-]*")

Key = str | int
KeyPath = tuple[Key, ...]


@dataclass(frozen=True)
class Place:
    """Where a value was given: `where` in words for a message, `text` as it was written if it is a single word."""

    where: str
    text: str | None = None


@dataclass
class Document:
    """What a text says: its value, and the place of every value inside, by the path of keys that leads there."""

    value: Any
    places: dict[KeyPath, Place] = field(default_factory=dict)


def read_file(path: Path) -> Document:
    """The mapping in a YAML file. Raises UserError, with the line, if there is none."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a YAML file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    document = read_text(text, str(path))
    if document.value is None:
        raise UserError(f"{path} is empty")
    if not isinstance(document.value, dict):
        found = "a list" if isinstance(document.value, list) else f"the single value {document.value!r}"
        raise UserError(f"{path} holds {found}; it must hold keys and values, such as `name: tiny`")
    return document


def read_text(text: str, source: str, *, lines: bool = True) -> Document:
    """The value of a YAML text that came from `source`, a file or (without `lines`) a flag.

    Raises UserError for what is not YAML, for a key given twice, and for a value that contains itself.
    """
    yaml = YAML(typ="safe", pure=True)
    try:
        node: Node | None = yaml.compose(text)
        reader = _Reader(yaml, source, lines)
        return Document(None if node is None else reader.build(node, ()), reader.places)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if lines and mark else ""
        problem = ": ".join(part for part in (error.context, error.problem) if part)
        raise UserError(f"{source}{line} is not valid YAML: {problem}") from None
    except YAMLError as error:
        raise UserError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{source} is nested too deeply") from None


def write_text(value: Any) -> str:
    """YAML 1.2 of plain values, keys in their order, short lists on one line; `read_text` gives the value back."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # a bool, annotated as None
    yaml.width = 100
    out = io.StringIO()
    yaml.dump(value, out)
    return out.getvalue()


class _Representer(SafeRepresenter):
    """Writes text in quotes unless it is a plain word: ruamel.yaml leaves `{?a: 1}` bare, which is another key."""

    def represent_str(self, data: str) -> ScalarNode:
        style = None if PLAIN_WORD.fullmatch(data) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Representer.add_representer(str, _Representer.represent_str)


class _Reader:
    """Builds plain values from the nodes of one text; nothing is shared between two uses of an anchor."""

    def __init__(self, yaml: YAML, source: str, lines: bool) -> None:
        self.yaml = yaml
        self.source = source
        self.lines = lines
        self.places: dict[KeyPath, Place] = {}
        self.above: list[Node] = []
        self.values = 0

    def build(self, node: Node, path: KeyPath) -> Any:
        """The value of `node`, which stands at `path`."""
        self.values += 1
        if self.values > MOST_VALUES:
            raise UserError(f"{self.source} holds more than {MOST_VALUES} values once its aliases are followed")
        if any(node is other for other in self.above):
            raise UserError(f"{self.where(node)}: the alias `*{node.anchor}` contains itself")
        self.places[path] = Place(self.where(node), node.value if isinstance(node, ScalarNode) else None)
        if isinstance(node, ScalarNode):
            return self.scalar(node)
        self.refuse_tag(node)
        self.above.append(node)
        value: Any = None
        if isinstance(node, SequenceNode):
            value = [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        elif isinstance(node, MappingNode):
            value = self.mapping(node, path)
        self.above.pop()
        return value

    def where(self, node: Node) -> str:
        return f"{self.source} line {node.start_mark.line + 1}" if self.lines else self.source

    def refuse_tag(self, node: Node) -> None:
        kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
        if kind not in ("str", "int", "float", "bool", "null", "timestamp", "value", "merge", "map", "seq"):
            raise UserError(f"{self.where(node)}: the tag `{node.tag}` has no meaning in a run file")

    def scalar(self, node: ScalarNode) -> Any:
        self.refuse_tag(node)
        if str(node.tag).endswith((":timestamp", ":value", ":merge")):
            return node.value
        return self.yaml.constructor.construct_object(node)

    def mapping(self, node: MappingNode, path: KeyPath) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        merged: dict[Any, Any] = {}
        lines: dict[Any, int] = {}
        for key_node, value_node in node.value:
            if str(key_node.tag).endswith(":merge"):
                merged = self.merge(value_node, path) | merged
                continue
            if not isinstance(key_node, ScalarNode):
                raise UserError(f"{self.where(key_node)}: a key must be a word, not a list or a mapping")
            key = self.scalar(key_node)
            line = key_node.start_mark.line + 1
            if key in values:
                dotted = ".".join(map(str, (*path, key)))
                raise UserError(f"{self.source}: `{dotted}` is given twice, in line {lines[key]} and in line {line}")
            values[key] = self.build(value_node, (*path, key))
            self.places[*path, key] = replace(self.places[*path, key], where=self.where(key_node))
            lines[key] = line
        return {key: value for key, value in merged.items() if key not in values} | values

    def merge(self, node: Node, path: KeyPath) -> dict[Any, Any]:
        """What `<<: *anchor` or `<<: [*a, *b]` adds under the mapping's own keys."""
        parts = node.value if isinstance(node, SequenceNode) else [node]
        added: dict[Any, Any] = {}
        for part in parts:
            if not isinstance(part, MappingNode):
                raise UserError(f"{self.where(part)}: `<<` merges a mapping, not a value")
            places = dict(self.places)
            added = self.build(part, path) | added
            self.places = self.places | {known: place for known, place in places.items() if known != path}
        return added
