"""Where the time of a step goes, as one bar and a table. Imports no torch."""

from __future__ import annotations

from html import escape

from fivefold.plan.forecast import Forecast
from fivefold.plan.forecast_table import time_rows
from fivefold.plan.page.chart import COLOURS, chart
from fivefold.plan.quantities import percent, time

WIDTH, HEIGHT = 900, 28


def time_bar(found: Forecast) -> str:
    """The parts of the busiest pipeline rank's step, in their shares of it."""
    rows, total = time_rows(found), found.step.seconds
    bars, cells, x = [], [], 0.0
    for number, (name, seconds, meaning) in enumerate(rows):
        colour, width = number % COLOURS, WIDTH * seconds / total
        words = f"{name}: {time(seconds)}, {percent(seconds / total)}"
        bars.append(
            f'<rect class="c{colour}" data-part="{name}" x="{x:.2f}" y="0" width="{width:.2f}" height="{HEIGHT}">'
            f"<title>{escape(words)}</title></rect>"
        )
        swatch = chart(10, 10, name, [f'<rect class="c{colour}" width="10" height="10"/>'])
        cells.append(
            f'<tr data-time="{name}"><td>{swatch} {escape(name)}</td><td>{time(seconds)}</td>'
            f"<td>{percent(seconds / total)}</td><td>{escape(meaning)}</td></tr>"
        )
        x += width
    picture = chart(WIDTH, HEIGHT, "time of a step by what it is spent on", bars)
    return f"{picture}<table><tr><th>part</th><th>time</th><th>share</th><th></th></tr>{''.join(cells)}</table>"
