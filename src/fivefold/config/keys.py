"""Which keys the run file has and what each may hold, read off its classes.

The reader asks here what a path such as `data.train.0.weight` means; the reference page and the messages ask how a type
is called. Nothing is listed by hand, so a new field is known everywhere at once.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from fivefold.config.run import Run, Section
from fivefold.config.yaml12 import KeyPath
from fivefold.near import near_names, question

PLAIN = {
    bool: ("true or false", "true or false"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
    type(None): ("null", "nulls"),
}


def fields(section: type[Section]) -> dict[str, FieldInfo]:
    """The section's fields by the key that stands in the file, in their order."""
    return {info.alias or name: info for name, info in section.model_fields.items()}


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union; of any other type, that type alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def section_in(annotation: Any) -> type[Section] | None:
    """The section class that a value of this type is, if it is one."""
    return next((m for m in members(annotation) if isinstance(m, type) and issubclass(m, Section)), None)


def item_type(annotation: Any) -> Any | None:
    """The type of a list's items; None for what is no list."""
    return next((get_args(m)[0] for m in members(annotation) if get_origin(m) in (list, tuple)), None)


def type_at(path: KeyPath) -> Any | None:
    """The type of the value at `path`; None if the run file has no such key."""
    annotation: Any = Run
    for key in path:
        section = section_in(annotation)
        if section is not None:
            info = fields(section).get(str(key))
            annotation = None if info is None else info.annotation
        elif isinstance(key, int):
            annotation = item_type(annotation)
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif annotation is not Any:
            annotation = None
        if annotation is None:
            return None
    return annotation


def default_list(path: KeyPath) -> list[Any]:
    """The default of the list at `path`, which a flag to one of its items changes; empty if it has none."""
    section = section_in(type_at(path[:-1]))
    default = None if section is None else fields(section)[str(path[-1])].get_default(call_default_factory=True)
    return list(default) if isinstance(default, list | tuple) else []


def default_of(key: str) -> Any:
    """The default of the key with this dotted name; pydantic's `PydanticUndefined` if it must be given."""
    section, _, last = key.rpartition(".")
    holder = section_in(type_at(tuple(section.split(".")))) if section else Run
    assert holder is not None, f"{section} is a section"
    return fields(holder)[last].get_default(call_default_factory=True)


def allowed(annotation: Any, *, plural: bool = False) -> str:
    """What a value of this type may be, in words: "a whole number or auto"."""
    parts = [_allowed_one(member, plural) for member in members(annotation)]
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " or " + parts[-1]


def _allowed_one(annotation: Any, plural: bool) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation][plural]
    if origin is Literal:
        words = [str(word) for word in arguments]
        return words[0] if len(words) == 1 else ("any of " if plural else "one of ") + ", ".join(words)
    if origin is tuple:
        return f"a list of {len(arguments)} {allowed(arguments[0], plural=True)}"
    if origin is list:
        return f"a list of {allowed(arguments[0], plural=True)}"
    if annotation is Any:
        return "anything"
    if origin is dict:
        return "keys and values"
    return (
        f"sections with {', '.join(fields(annotation))}"
        if plural
        else f"a section with {', '.join(fields(annotation))}"
    )


@cache
def dotted_keys() -> tuple[str, ...]:
    """Every key of the run file by its dotted name; a list's items stand as 0: `data.train.0.path`."""
    return tuple(_dotted(Run, ""))


def _dotted(section: type[Section], prefix: str) -> Iterator[str]:
    for key, info in fields(section).items():
        yield prefix + key
        inner, item = section_in(info.annotation), item_type(info.annotation)
        if inner is not None:
            yield from _dotted(inner, f"{prefix}{key}.")
        elif item is not None and section_in(item) is not None:
            yield from _dotted(item, f"{prefix}{key}.0.")


def unknown_key(path: KeyPath, *, shown: str | None = None) -> str:
    """The complaint about a key that does not exist: what was probably meant, and which keys there are.

    `shown` is how the user wrote it if that was a flag; the suggestion is then one, too.
    """
    section_path = path[:-1]
    while section_path and _section_at(section_path) is None:
        section_path = section_path[:-1]
    section = _section_at(section_path) or Run
    prefix = ".".join(map(str, section_path))
    known = ", ".join(fields(section))
    meant = _meant(path, section_path, section)
    dashes = "--" if shown else ""
    suggestion = question([f"`{dashes}{meant}`"] if meant else [])
    return f"`{shown or '.'.join(map(str, path))}` does not exist; {suggestion}{prefix or 'the run file'} has {known}"


def _section_at(path: KeyPath) -> type[Section] | None:
    return section_in(type_at(path))


def _meant(path: KeyPath, section_path: KeyPath, section: type[Section]) -> str | None:
    """The existing key that is nearest to `path`: in its own section, or of the same name elsewhere."""
    near = near_names(str(path[len(section_path)]), fields(section))
    if near and len(path) == len(section_path) + 1:
        return ".".join(map(str, (*section_path, near[0])))
    last_words = {key.rpartition(".")[2] for key in dotted_keys()}
    near = near_names(str(path[-1]), sorted(last_words), most=3, cutoff=0.75)
    candidates = [key for key in dotted_keys() if key.rpartition(".")[2] in near]
    return next(iter(near_names(".".join(map(str, path)), candidates, cutoff=0)), None)
