"""Own model families, optimizers, decays and data sources: found by name, built in or registered by entry point.

A package registers one under the group `fivefold.<kind>` in its pyproject.toml, for example
`[project.entry-points."fivefold.families"]` with `mine = "my_package:family"`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.metadata import entry_points
from typing import TypeVar

from fivefold.errors import UserError
from fivefold.near import did_you_mean

T = TypeVar("T")


def find(kind: str, name: str, built_in: Mapping[str, T]) -> T:
    """The object called `name` among `built_in` and the entry points of `fivefold.<kind>`.

    Raises UserError with the known names if there is none, or if what is registered cannot be imported.
    """
    if name in built_in:
        return built_in[name]
    registered = {point.name: point for point in entry_points(group=f"fivefold.{kind}")}
    if name in registered:
        point = registered[name]
        try:
            return point.load()
        except (ImportError, AttributeError) as error:
            raise UserError(
                f"{name!r} is registered under fivefold.{kind} as {point.value}, which cannot be imported: {error}; "
                f"try `python -c 'import {point.module}'`"
            ) from error
    raise UserError(f"no {kind} called {name!r}: {say_known(kind, name, sorted({*built_in, *registered}))}")


def say_known(kind: str, name: str, known: Collection[str], also: str = "") -> str:
    """What to say after a name that is none of the `known` ones: a near one, all of them (and `also`), and how another
    is registered."""
    names = ", ".join(known) or "none"
    return f"{did_you_mean(name, known)}known are {names}{also}; others register under the entry point fivefold.{kind}"


def names(kind: str, built_in: Mapping[str, object] | tuple[str, ...]) -> list[str]:
    """All names that `find` would take."""
    return sorted({*built_in, *(point.name for point in entry_points(group=f"fivefold.{kind}"))})
