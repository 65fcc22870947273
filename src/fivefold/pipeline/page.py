"""Timelines as one HTML page: their numbers in a table, and the picture. It needs no script and nothing from elsewhere.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fivefold.pages import document
from fivefold.pipeline.draw import Panel
from fivefold.pipeline.draw_svg import comfortable_width, svg

_STYLE = (
    "body{font:14px system-ui,sans-serif;color:#222;background:#fff;margin:24px}"
    "table{border-collapse:collapse;margin:16px 0}"
    "th,td{text-align:left;padding:3px 20px 3px 0;border-bottom:1px solid #ddd;font-weight:400}"
    "thead th{font-weight:600}"
    ".wide{overflow-x:auto}"
)


def page(title: str, panels: Sequence[Panel], notes: Sequence[str] = ()) -> str:
    """The page of at least one panel; a title of a box appears when the pointer rests on it."""
    columns = [panel.numbers() for panel in panels]
    head = "".join(f"<th>{escape(panel.title)}</th>" for panel in panels)
    rows = "".join(
        f"<tr><th>{name}</th>" + "".join(f"<td>{escape(column[number][1])}</td>" for column in columns) + "</tr>"
        for number, (name, _) in enumerate(columns[0])
    )
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(note)}</p>" for note in notes),
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table>",
        f'<div class="wide">{svg(panels, comfortable_width(panels))}</div>',
    ]
    return document(title, _STYLE, body)
