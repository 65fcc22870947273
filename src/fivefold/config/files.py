"""Reading a run file with its overrides into a `Run`, and writing a `Run` back.

Flags lie over the file, and the file's `model` lies over the fields of its preset (or config.json). Whatever is wrong
is collected and said at once: first all keys and types, and when those are right all rules of `rules.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fivefold.config import overrides as flags
from fivefold.config.keys import allowed, fields, item_type, members, section_in, type_at, unknown_key
from fivefold.config.models import huggingface_fields, preset_fields
from fivefold.config.rule import Rule
from fivefold.config.rules import RULES, check
from fivefold.config.run import Model, Run, Section
from fivefold.config.yaml12 import Document, KeyPath, Place, read_file, write_text
from fivefold.errors import UserError

PROVENANCE = ("preset", "from", "weights")
"""The fields of `model` that say where the others come from."""


class ConfigError(UserError):
    """The run file, or a flag over it, is wrong. `problems` has one sentence for each fault; the message has all."""

    def __init__(self, problems: Sequence[str], source: str | None = None) -> None:
        self.problems = tuple(problems)
        head = f"{source}: " if source else ""
        if len(self.problems) == 1:
            super().__init__(head + self.problems[0])
        else:
            lines = "".join(f"\n  - {problem}" for problem in self.problems)
            super().__init__(f"{head}{len(self.problems)} things are wrong{lines}")


def load_run(path: Path, overrides: Sequence[str] = (), rules: Sequence[Rule] = RULES) -> Run:
    """The run that the file at `path` describes, with `overrides` (`["--optim.lr", "1e-3"]`) over it.

    Relative paths in it are relative to the current directory. Raises ConfigError with everything that is wrong, the
    broken ones of `rules` among it.
    """
    run = _run_of(_read(path), overrides, str(path))
    broken = check(run, rules=rules)
    if broken:
        raise ConfigError(broken, str(path))
    return run


def _read(path: Path) -> Document:
    try:
        return read_file(path)
    except UserError as error:
        start = not path.exists() or (path.is_file() and not path.stat().st_size)
        hint = "; `fivefold init > run.yaml` writes a run file to start from" if start else ""
        raise ConfigError([f"{error}{hint}"]) from None


def _run_of(document: Document, arguments: Sequence[str], source: str) -> Run:
    """The run, not yet checked against the rules. Raises ConfigError with all complaints about keys and types."""
    given, problems = flags.parse(arguments)
    values, places = document.value, document.places
    for override in given:
        places = places | override.places
    asked = deepcopy(values)
    problems += flags.apply(given, asked)
    in_file, over_base = _around_base(given)
    flags.apply(in_file, values)
    try:
        base = _base_of(_section(asked, "model"), _section(values, "model"))
    except UserError as error:
        base = None
        problems.append(str(error))
    if base is not None and base.value:
        values["model"] = _laid_over(base.value, _section(values, "model"))
        places = {("model", *inner): place for inner, place in base.places.items()} | places
    flags.apply(over_base, values)
    problems += _tidy(Run, values, (), places)
    try:
        run = Run.model_validate(values)
    except ValidationError as error:
        problems += _explain(error, values, places, missing_in_model=base is not None)
    if problems:
        raise ConfigError(problems, source)
    return run


def _around_base(given: Sequence[flags.Override]) -> tuple[Sequence[flags.Override], Sequence[flags.Override]]:
    """The flags that stand for something in the file, and those that lie over the model's base.

    A model that a flag gives whole is as one in the file: the preset that it names lies under it.
    """
    wholes = [number for number, override in enumerate(given, 1) if override.path == ("model",)]
    last = max(wholes, default=0)
    return given[:last], given[last:]


def _laid_over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over `base`, inside sections too: what a section of one's own leaves out is the base's."""
    inner = {
        key: _laid_over(base[key], value)
        for key, value in own.items()
        if isinstance(value, dict) and isinstance(base.get(key), dict)
    }
    return base | own | inner


def _section(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The section at `key`; an empty one if it is left out, or holds something else, which is reported later."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def _base_of(asked: dict[str, Any], in_file: dict[str, Any]) -> Document:
    """The fields that lie under the user's own in `model`. Raises UserError if they cannot be had.

    `asked` is the section with the flags over it, `in_file` without. A model of which the file gives every field needs
    no base: so a run that was written out no longer needs its preset.
    """
    preset, source = asked.get("preset"), asked.get("from")
    if preset is not None and source is not None:
        raise UserError(f"model.preset = {preset} and model.from = {source} exclude each other; set one to null")
    if set(fields(Model)) - set(PROVENANCE) <= set(in_file):
        if (preset, source) != (in_file.get("preset"), in_file.get("from")):
            raise UserError(
                f"model.{'preset' if preset else 'from'} = {preset or source} would change nothing: the file "
                "gives every field of model; take out those that the preset should give"
            )
        return Document({})
    if isinstance(preset, str):
        return preset_fields(preset)
    return huggingface_fields(source) if isinstance(source, str) else Document({})


def _tidy(section: type[Section], values: dict[Any, Any], path: KeyPath, places: dict[KeyPath, Place]) -> list[str]:
    """Prepare `values` for the classes, in place; returns the complaints about unknown keys, which are taken out.

    An empty section (`cluster:`) is left out, and a word that YAML reads as a number is text where text is wanted.
    """
    problems = []
    known = fields(section)
    for key in list(values):
        here = (*path, key)
        if key not in known:
            problems.append(_at(here, places, unknown_key(here)))
            del values[key]
            continue
        annotation, value = known[key].annotation, values[key]
        inner, item = section_in(annotation), item_type(annotation)
        if value is None and type(None) not in members(annotation) and (inner or item):
            del values[key]
        elif inner and isinstance(value, dict):
            problems += _tidy(inner, value, here, places)
        elif item and section_in(item) and isinstance(value, list):
            for index, element in enumerate(value):
                if isinstance(element, dict):
                    problems += _tidy(section_in(item), element, (*here, index), places)  # type: ignore[arg-type]
        elif isinstance(value, int | float) and _is_text(annotation) and here in places:
            values[key] = places[here].text
    return problems


def _is_text(annotation: Any) -> bool:
    """Whether a value of this type is always text, so that `name: 7` means the text 7."""
    return bool({str, Path} & set(members(annotation))) and not {bool, int, float} & set(members(annotation))


def _at(path: KeyPath, places: dict[KeyPath, Place], sentence: str) -> str:
    place = places.get(path)
    return f"{sentence} ({place.where})" if place else sentence


def _explain(
    error: ValidationError, values: dict[str, Any], places: dict[KeyPath, Place], *, missing_in_model: bool
) -> list[str]:
    """pydantic's complaints as sentences: one for each value, and one for all missing keys of a section."""
    wrong: dict[KeyPath, str] = {}
    missing: dict[KeyPath, list[str]] = {}
    for detail in error.errors(include_url=False, include_context=False):
        path, value = _inside(detail["loc"], values)
        if detail["type"] == "missing":
            missing.setdefault(path, []).append(str(detail["loc"][-1]))
        else:
            sentence = (
                f"{'.'.join(map(str, path))} = {_shown(value)} is not possible; it must be {allowed(type_at(path))}"
                f"{_written_out(value, type_at(path))}"
            )
            wrong[path] = _at(path, places, sentence)
    if not missing_in_model:
        missing.pop(("model",), None)
    return [*wrong.values(), *(_missing(path, keys) for path, keys in missing.items())]


LETTERS = {"k": 3, "m": 6, "g": 9, "b": 9, "t": 12}
"""Letters behind a number, as people write it, and the powers of ten that they stand for."""


def _written_out(value: Any, annotation: Any) -> str:
    """How to write a number such as 2T, where a number is wanted; empty for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgbt])", value.lower()) if isinstance(value, str) else None
    if match is None or not {int, float} & set(members(annotation)):
        return ""
    power = LETTERS[match[2]]
    whole = float not in members(annotation)
    return f"; write {float(match[1]) * 10**power:.0f}" if whole else f"; write {match[1]}e{power}"


def _inside(location: tuple[str | int, ...], values: Any) -> tuple[KeyPath, Any]:
    """The part of pydantic's location that is a path in the file, and the value that stands there."""
    path: list[str | int] = []
    for key in location:
        known: Any = values if isinstance(values, dict) else range(len(values)) if isinstance(values, list) else ()
        if key not in known:
            break
        values = values[key]
        path.append(key)
    return tuple(path), values


def _shown(value: Any) -> str:
    text = write_text(value).removesuffix("...\n").strip() if not isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _missing(path: KeyPath, keys: list[str]) -> str:
    name = ".".join(map(str, path)) or "the run file"
    what = f"{name} lacks {', '.join(keys)}"
    if path == ("model",):
        return f"{what}; name a preset (`fivefold presets` lists them), or `from`, or give them"
    wanted = [f"{key}: {allowed(type_at((*path, key)))}" for key in keys]
    return f"{what} ({'; '.join(wanted)})"


def dump_run(run: Run) -> str:
    """The run as YAML with every key written out; `load_run` reads an equal Run from it, without preset or hub."""
    return write_text(_plain(run.model_dump(by_alias=True)))


def _plain(value: Any) -> Any:
    """`value` of the types that YAML has: a path is text, a tuple is a list."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def difference(a: Run, b: Run) -> list[tuple[str, Any, Any]]:
    """What differs between two runs: (dotted key, value in `a`, value in `b`), in the order of the run file."""
    return _differences("", _plain(a.model_dump(by_alias=True)), _plain(b.model_dump(by_alias=True)))


def _differences(name: str, a: Any, b: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and all(isinstance(x, dict) for x in a + b):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if a == b else [(name, a, b)]
    found = []
    for key in [*a, *(key for key in b if key not in a)]:
        found += _differences(f"{name}.{key}" if name else str(key), a.get(key), b.get(key))
    return found
