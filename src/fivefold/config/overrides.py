"""Flags that override the run file: `--a.b 2` or `--a.b=2`, any key, its value read as YAML 1.2.

A list's item is reached by its number (`--data.train.0.weight 2`), a list or a section can be given whole
(`--data.train '[{path: x}]'`) and then replaces what the file says. `--gpu` and `--gpus` are short for the cluster's.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from fivefold.config.keys import default_list, type_at, unknown_key
from fivefold.config.yaml12 import KeyPath, Place, read_text
from fivefold.errors import UserError

SHORT = {"gpu": "cluster.gpu", "gpus": "cluster.gpus"}


@dataclass(frozen=True)
class Override:
    """One flag: the key it sets and the value it gives."""

    flag: str
    path: KeyPath
    value: Any
    places: dict[KeyPath, Place]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The positional words and the flags (each with its value) of a command line, whichever order they came in."""
    words: list[str] = []
    flags: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            words.append(argument)
            continue
        flags.append(argument)
        if "=" not in argument and rest and not rest[0].startswith("--"):
            flags.append(rest.pop(0))
    return words, flags


def parse(arguments: Sequence[str]) -> tuple[list[Override], list[str]]:
    """The overrides that `arguments` give, and a complaint for each that gives none."""
    overrides: list[Override] = []
    problems: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        flag, equals, text = argument.partition("=")
        if not flag.startswith("--") or flag == "--":
            problems.append(f"`{argument}` is neither a flag nor a flag's value; a flag is written --section.key VALUE")
            continue
        path = _path(flag)
        if type_at(path) is None:
            problems.append(unknown_key(path, shown=flag))
            _drop_value(rest, equals)
        elif not equals and (not rest or rest[0].startswith("--")):
            problems.append(f"`{flag}` needs a value: {flag} VALUE")
        else:
            _read(flag, path, text if equals else rest.pop(0), overrides, problems)
    return overrides, problems


def _path(flag: str) -> KeyPath:
    name = flag.removeprefix("--")
    return tuple(int(key) if key.isdecimal() else key for key in SHORT.get(name, name).split("."))


def _drop_value(rest: list[str], equals: str) -> None:
    if not equals and rest and not rest[0].startswith("--"):
        rest.pop(0)


def _read(flag: str, path: KeyPath, text: str, overrides: list[Override], problems: list[str]) -> None:
    try:
        document = read_text(text, f"flag {flag}", lines=False)
    except UserError as error:
        problems.append(f"{error} (the value was {text!r})")
        return
    places = {(*path, *inner): place for inner, place in document.places.items()}
    overrides.append(Override(flag, path, document.value, places))


def apply(overrides: Sequence[Override], values: dict[str, Any]) -> list[str]:
    """Set each override in `values`, which is changed; returns a complaint for each that has nowhere to go."""
    return [problem for override in overrides if (problem := _set(override, values))]


def _set(override: Override, values: dict[str, Any]) -> str | None:
    holder: Any = values
    key: Any
    for depth, key in enumerate(override.path):
        if isinstance(key, int) != isinstance(holder, list) or not isinstance(holder, list | dict):
            return None  # the file has a value where a section belongs, which is reported as such
        if isinstance(key, int) and key >= len(holder):
            name = ".".join(map(str, override.path[:depth]))
            return f"`{override.flag}`: {name} has no item {key}; it has {len(holder)}, counted from 0"
        if depth == len(override.path) - 1:
            holder[key] = deepcopy(override.value)
        elif isinstance(holder, dict) and holder.get(key) is None:
            holder[key] = default_list(override.path[: depth + 1]) if isinstance(override.path[depth + 1], int) else {}
        holder = holder[key]
    return None
