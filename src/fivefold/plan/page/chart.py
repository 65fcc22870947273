"""What the pictures of a plan's page have in common: colours for light and dark paper, text, legends.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fivefold.pages import DARK, LIGHT

COLOURS = len(LIGHT)


def _variables(colours: Sequence[str]) -> str:
    return "".join(f"--c{number}:{colour};" for number, colour in enumerate(colours))


STYLE = "".join(
    [
        f":root{{{_variables(LIGHT)}}}@media(prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}",
        # The pipeline's picture has rules for all text of the page; these weigh more.
        "svg.chart text{font:11px system-ui,sans-serif;fill:var(--ink)}",
        "svg.chart text.name{font-weight:600;font-size:13px}",
        ".axis{stroke:var(--line)}.limit{stroke:var(--bad);stroke-width:2}.line{fill:none;stroke-width:1.6}",
        *(f".c{number}{{fill:var(--c{number})}}.l{number}{{stroke:var(--c{number})}}" for number in range(COLOURS)),
    ]
)
"""Needs the variables --ink, --line and --bad."""


def chart(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """A picture of so many pixels."""
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    )


def text(words: str, x: float, y: float, anchor: str = "start", style: str = "") -> str:
    """A line of text."""
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def legend(names: Sequence[tuple[int, str]], left: float, width: float, top: float) -> tuple[list[str], float]:
    """Colours and what they stand for, in lines not wider than `width`; and where the next thing may begin."""
    parts, x, y = [], left, top
    for colour, words in names:
        length = 14 + 6.3 * len(words) + 14
        if x + length > left + width and x > left:
            x, y = left, y + 18
        parts.append(f'<rect class="c{colour}" x="{x:.1f}" y="{y:.1f}" width="10" height="10"/>')
        parts.append(text(words, x + 14, y + 9))
        x += length
    return parts, y + 24
