"""What the project's pages and pictures have in common: the frame of a page, numbers as words, round marks on an axis.

A page needs no script and nothing from elsewhere. Imports nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

LIGHT = (
    "#1f5fc4",
    "#d1570a",
    "#1a8a5a",
    "#8a3ab8",
    "#b3861a",
    "#c22f5e",
    "#3c8fa3",
    "#6b6b6b",
    "#84a729",
    "#7a4a2a",
    "#b9a9c9",
)
DARK = (
    "#78aaff",
    "#ff9d5c",
    "#5fd6a2",
    "#cf9bff",
    "#e8c35a",
    "#ff86a8",
    "#7fd3e6",
    "#a9a9a9",
    "#b9dc62",
    "#c99a76",
    "#57506b",
)
"""Colours of curves and bars on light paper, and the same on dark paper."""


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
