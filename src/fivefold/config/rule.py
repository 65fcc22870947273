"""What a rule is: the keys it is about, when it is broken, and the sentence it then says; and the words rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from fivefold.config.run import Run

ATTRIBUTE = {"validate": "validation", "from": "from_"}
"""The two keys of the run file whose attribute in `Run` is called otherwise."""


@dataclass(frozen=True)
class Rule:
    """One condition on a run. While a rule about a single key is broken, no later rule reads that key."""

    name: str
    """What should hold, as a statement."""
    about: tuple[str, ...]
    """The dotted keys that it reads."""
    broken: Callable[[Run], object]
    """True (or anything that counts as true) if the run breaks it."""
    says: Callable[[Run], str]
    """Called if it is broken: what is wrong, the numbers, what to do."""


def value_of(run: Run, key: str) -> Any:
    """The value at a dotted key; None below a section that is null."""
    value: Any = run
    for part in key.split("."):
        value = None if value is None else getattr(value, ATTRIBUTE.get(part, part))
    return value


def divisors_of(number: int) -> list[int]:
    """The divisors of a positive number, smallest first; to stay quick, those up to 10^6 and their counterparts."""
    small = [d for d in range(1, min(isqrt(number), 10**6) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def multiples_around(number: int, unit: int) -> list[int]:
    """The positive multiples of `unit` next below and above `number`."""
    below = number // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def choices(values: Sequence[int | str]) -> str:
    """What to choose from, such as "1, 2 or 4"; of many, the first and the last."""
    words = [str(value) for value in values]
    if len(words) > 10:
        words = [*words[:6], "...", *words[-2:]]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]
