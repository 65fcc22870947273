"""The catalogue of accelerators, by the names that people and drivers give them. Imports no torch.

The entries lie beside this file in `accelerators.json`, in the units and with the keys that a file of the user's own
has (`entry.py`), each number with where it comes from.
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fivefold.errors import UserError
from fivefold.hardware.accelerator import Accelerator
from fivefold.hardware.entry import accelerator_of, read_entry
from fivefold.near import bare, near_names, question

VENDORS = re.compile(r"^(NVIDIA|Tesla|AMD Instinct|AMD)\s+")
"""Before the name that a driver tells."""
WRITTEN_VENDORS = re.compile(r"^((nvidia|tesla|amd|instinct|google)[\s_-]*)+", re.IGNORECASE)
"""Before a name that somebody writes."""


@cache
def accelerators() -> tuple[Accelerator, ...]:
    """All that ship with Fivefold."""
    return tuple(accelerator_of(entry) for entry in _entries())


@cache
def _entries() -> list[dict[str, Any]]:
    text = (files("fivefold.hardware") / "accelerators.json").read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = json.loads(text)
    return entries


@cache
def _by_key() -> dict[str, Accelerator]:
    known: dict[str, Accelerator] = {}
    for entry, accelerator in zip(_entries(), accelerators(), strict=True):
        for name in (accelerator.name, *entry.get("aliases", ())):
            known[bare(name)] = accelerator
    return known


def names() -> list[str]:
    """The full names."""
    return [accelerator.name for accelerator in accelerators()]


def by_name(name: str) -> Accelerator:
    """The accelerator of this name or alias (h100 is H100-SXM-80GB), or the one that a YAML file describes.

    A vendor before the name (nvidia-h100) is left out.
    Raises UserError with near names if there is none, or with all that is wrong with the file.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return read_entry(Path(name).expanduser())
    model = WRITTEN_VENDORS.sub("", name)
    found = _by_key().get(bare(model))
    if found is None:
        near = dict.fromkeys(_by_key()[each].name for each in near_names(model, _by_key(), most=3, cutoff=0.5))
        raise UserError(
            f"cluster.gpu = {name}: there is no such accelerator in the catalogue; {question(near)}known are "
            f"{', '.join(names())}; one of your own is a YAML file, as `fivefold bench --out FILE.yaml` writes it"
        )
    return found


def by_driver_name(name: str) -> Accelerator | None:
    """The accelerator that the driver calls `name`, such as "NVIDIA H200"; None if the catalogue lacks it.

    A part of one ("NVIDIA H200 MIG 3g.71gb") is none.
    """
    if " MIG " in name:
        return None
    bare = VENDORS.sub("", name.strip())
    fitting = [
        (len(pattern), accelerator)
        for accelerator in accelerators()
        for pattern in accelerator.driver_names
        if fnmatchcase(bare, pattern)
    ]
    return max(fitting, key=lambda each: each[0])[1] if fitting else None


def is_driven_as(accelerator: Accelerator, name: str) -> bool:
    """Whether the driver calls this accelerator `name`; one of a file goes by the file's patterns."""
    known = by_driver_name(name)
    if known is not None and accelerator.name.removesuffix("-measured") == known.name:
        return True
    bare = VENDORS.sub("", name.strip())
    return accelerator not in accelerators() and any(fnmatchcase(bare, each) for each in accelerator.driver_names)
