"""A heat map of experts' loads as an SVG picture, to stand in a page: a cell an expert, blue below even, orange above.

Each cell's numbers show where the pointer rests. The scale is logarithmic and the same in every picture, so that
pictures compare. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fivefold.pages import say

EDGES = (0.1, 0.25, 0.5, 0.7, 0.9, 1.1, 1.4, 2.0, 4.0, 8.0)
"""Loads at which the colour changes."""
WIDTH = 1040
"""Of all cells together, at most."""
LEFT, TOP = 64, 64
_SWATCH = 46

_LIGHT = "12407f #2f6db8 #6fa5db #abcdec #d9e8f6 #ececec #fbe2c2 #f5bd7a #e98a33 #c95a10 #872f08"
_DARK = "b9dcff #86bcfa #5790d6 #3b6699 #2b435f #2c2f34 #54402a #865a26 #c07a2c #f0a24a #ffd49a"


def _colours(words: str) -> str:
    return "".join(f"--h{number}:#{word.lstrip('#')};" for number, word in enumerate(words.split()))


STYLE = (
    f":root{{{_colours(_LIGHT)}}}@media(prefers-color-scheme:dark){{:root{{{_colours(_DARK)}}}}}"
    + "".join(f".h{number}{{fill:var(--h{number})}}" for number in range(len(EDGES) + 1))
    + ".heat rect:hover{stroke:var(--ink)}"
)
"""Needs the variable --ink."""


@dataclass(frozen=True)
class Row:
    """A line of cells."""

    name: str
    loads: Sequence[float]
    titles: Sequence[str]
    """What shows at each cell."""


def heat_map(title: str, rows: Sequence[Row], columns: Sequence[str], below: str) -> str:
    """The picture, with a name a row and some of the `columns` named; `below` says what columns are."""
    wide = _whole(WIDTH / len(columns), 3, 28)
    high = _whole(640 / len(rows), 3, 18)
    width, height = max(LEFT + wide * len(columns) + 16, 640), TOP + high * len(rows) + 36
    parts = [
        f'<svg class="heat" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="14">{escape(title)}</text>',
        _legend(),
    ]
    for number, row in enumerate(rows):
        y = TOP + high * number
        if number % _every(high, 12) == 0:
            parts.append(f'<text x="{LEFT - 6}" y="{y + high / 2 + 4:g}" text-anchor="end">{escape(row.name)}</text>')
        for place, (load, words) in enumerate(zip(row.loads, row.titles, strict=True)):
            parts.append(
                f'<rect class="h{shade(load)}" x="{LEFT + wide * place}" y="{y}" width="{wide}" height="{high}">'
                f"<title>{escape(words)}</title></rect>"
            )
    bottom = TOP + high * len(rows) + 14
    for place in range(0, len(columns), _every(wide, 7 * max(map(len, columns)) + 8)):
        middle = LEFT + wide * (place + 0.5)
        parts.append(f'<text x="{middle:g}" y="{bottom}" text-anchor="middle">{escape(columns[place])}</text>')
    parts += [f'<text x="{LEFT}" y="{bottom + 16}">{escape(below)}</text>', "</svg>"]
    return "\n".join(parts)


def shade(load: float) -> int:
    """Number of the colour of a load."""
    return bisect_right(EDGES, load)


def _legend() -> str:
    """The colours in a row, with the loads at which they change."""
    parts = []
    for number in range(len(EDGES) + 1):
        x = LEFT + _SWATCH * number
        parts.append(f'<rect class="h{number}" x="{x}" y="24" width="{_SWATCH}" height="12"/>')
        if number:
            parts.append(f'<text x="{x}" y="48" text-anchor="middle">{say(EDGES[number - 1])}</text>')
    end = LEFT + _SWATCH * (len(EDGES) + 1) + 8
    return "".join([*parts, f'<text x="{end}" y="34">x even</text>'])


def _whole(size: float, least: int, most: int) -> int:
    return int(min(max(size, least), most))


def _every(size: int, room: int) -> int:
    """Of how many neighbours one can be named."""
    return -(-room // size)
