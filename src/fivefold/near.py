"""Names that are near one that does not exist, for the message that refuses it. Imports nothing of ours.

Every message that refuses a name asks here, so that all of them take the same mistakes for one: capitals, dashes,
dots and spaces left out or put in, and letters that were mistyped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

CUTOFF = 0.6
"""Likeness, as difflib counts it, below which two names have nothing to do with each other."""


def bare(name: str) -> str:
    """The letters and digits of a name, in lower case: those of zb-v, ZB V and zbv are the same."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def near_names(name: str, known: Iterable[str], most: int = 1, cutoff: float = CUTOFF) -> list[str]:
    """Of the `known` names those that `name` may have been meant for, the nearest first, at most so many."""
    names = list(known)
    keys = get_close_matches(bare(name), {bare(each) for each in names}, n=most, cutoff=cutoff)
    found = [each for key in keys for each in names if bare(each) == key]
    return sorted(found, key=lambda each: -SequenceMatcher(None, name, each).ratio())[:most]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question whether the nearest of the `known` names was meant, as `question` asks it."""
    return question(near_names(name, known))


def question(near: Iterable[str]) -> str:
    """`did you mean zb-v or zb-h1? `, with a space behind it; empty if there is no near name."""
    names = " or ".join(near)
    return f"did you mean {names}? " if names else ""
