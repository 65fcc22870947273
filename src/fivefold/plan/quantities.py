"""Quantities of a plan: checks that name the unit which is meant, and numbers written for people.

All figures inside the planner are plain SI: bytes, seconds, FLOP/s. What arrives in another unit is caught here by its
size where it can be. Sizes are written in decimal units, as disks and GPUs are sold. Imports nothing of ours but
errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, log10
from typing import Any

from fivefold.errors import UserError

HOUR = 3600.0
DAY = 24 * HOUR
YEAR_HOURS = 8766.0
"""Of a year of 365.25 days."""


def positive(what: str, value: float, unit: str) -> None:
    """Raise UserError unless `value` is a number above 0; `unit` says what it is counted in."""
    if not isfinite(value) or value <= 0:
        raise UserError(f"{what} is {value:g}; give a number above 0, in {unit}")


def not_negative(what: str, value: float, unit: str) -> None:
    """Raise UserError unless `value` is a number of 0 or more."""
    if not isfinite(value) or value < 0:
        raise UserError(f"{what} is {value:g}; give 0 or more, in {unit}")


def whole(what: str, value: float) -> None:
    """Raise UserError unless `value` counts at least one of something."""
    if not isfinite(value) or value < 1 or value != int(value):
        raise UserError(f"{what} is {value:g}; give a whole number of at least 1")


def fraction(what: str, value: float) -> None:
    """Raise UserError unless 0 < `value` <= 1; a percentage is recognized."""
    if isfinite(value) and 1 < value <= 100:
        raise UserError(f"{what} is {value:g}; it is a fraction, so write {value / 100:g} for {value:g} %")
    if not isfinite(value) or not 0 < value <= 1:
        raise UserError(f"{what} is {value:g}; give a fraction above 0 and at most 1")


def at_least(what: str, value: float, least: float, unit: str, instead: str) -> None:
    """Raise UserError if `value` is so small that it must be in another unit; `instead` says how to write it."""
    positive(what, value, unit)
    if value < least:
        raise UserError(f"{what} is {value:g} {unit}, which is too little to be meant; {instead}")


def count(number: float) -> str:
    """A number of things in four digits, below a million in full: 2,048, 1.5, 405.9B, 40T."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if unit <= number < 1e15:
            return f"{number / unit:.4g}{letter}"
    if abs(number) < 1e6 and (number == int(number) or abs(number) >= 1000):
        return f"{number:,.0f}"
    return f"{number:.4g}"


def size(count_of_bytes: float) -> str:
    """Bytes in decimal units, to three digits: 15.6 GB, 32 TB."""
    return _scaled(count_of_bytes, "B")


def rate(bytes_per_s: float) -> str:
    """Bytes a second in decimal units: 1.2 GB/s."""
    return _scaled(bytes_per_s, "B/s")


def time(seconds: float) -> str:
    """A length of time in the unit in which it is short: 90 s, 25.9 min, 3.09 h, 54 days."""
    for unit, name, least in ((DAY, "days", 3 * DAY), (HOUR, "h", 2 * HOUR), (60.0, "min", 120.0)):
        if seconds >= least:
            return f"{_digits(seconds / unit)} {name}"
    return f"{_digits(seconds)} s"


def percent(share: float) -> str:
    """A share as a percentage with one decimal place."""
    return f"{share:.1%}"


def formula(name: str, words: str, numbers: str, value: str) -> str:
    """A line of --explain: what it is, how it comes about, with its numbers."""
    return f"{name} = {words} = {numbers} = {value}"


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for JSON: an infinite or undefined number, which JSON has not, becomes null."""
    return {key: None if isinstance(value, float) and not isfinite(value) else value for key, value in values.items()}


def _scaled(number: float, unit: str) -> str:
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    step = 0 if number < 1 else min(len(prefixes) - 1, int(log10(number * (1 + 1e-12)) // 3))
    return f"{_digits(number / 1000**step)} {prefixes[step]}{unit}"


def _digits(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"
