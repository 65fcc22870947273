"""What the project's pages and pictures have in common: the frame of a page, numbers as words, round marks on an axis.

A page needs no script and nothing from elsewhere. Imports nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape


def document(title: str, style: str, body: Iterable[str]) -> str:
    """A whole HTML page. `style` is CSS; `body` is HTML, escaped by who made it."""
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def say(value: float) -> str:
    """A number in at most five digits, more only before its point."""
    return f"{value:.0f}" if abs(value) >= 1e5 else f"{value:.5g}"


def round_step(rough: float) -> float:
    """The next larger of 1, 2, 5, 10, ..., or such a number times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
