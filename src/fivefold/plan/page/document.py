"""A forecast as one HTML page: its figures, and pictures of memory, pipeline, time and scaling.

It needs neither script nor network, and follows the reader's choice of light or dark. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from fivefold.outputs import write_file
from fivefold.pages import document
from fivefold.plan.explain import explanation
from fivefold.plan.figures import Figure, meanings
from fivefold.plan.forecast import Forecast
from fivefold.plan.forecast_table import error_line, headline, model_line
from fivefold.plan.page import chart
from fivefold.plan.page.memory import memory_bars
from fivefold.plan.page.pipeline import pipeline_picture
from fivefold.plan.page.scaling import scaling_curves, scaling_table
from fivefold.plan.page.time import time_bar

STYLE = (
    ":root{color-scheme:light dark;--ink:#222;--paper:#fff;--line:#ddd;--faint:#666;--bad:#b3182a}"
    "@media(prefers-color-scheme:dark){:root{--ink:#ddd;--paper:#16181b;--line:#3a3d42;--faint:#999;--bad:#ff7b86}}"
    "body{font:14px system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:24px}"
    "table{border-collapse:collapse;margin:16px 0}"
    "th,td{text-align:left;vertical-align:top;padding:3px 20px 3px 0;border-bottom:1px solid var(--line)}"
    "th{font-weight:600}tr[data-figure] td:not(:last-child){white-space:nowrap}td small{color:var(--faint)}"
    ".bad{color:var(--bad);font-weight:600}.good{font-weight:600}"
    ".wide{overflow-x:auto;margin:16px 0}pre{overflow-x:auto;font-size:12px}"
    # The pipeline's picture has a style of its own, for white paper, which comes later and weighs less.
    ".pipeline .paper{fill:var(--paper)}.pipeline text{fill:var(--ink)}.pipeline .idle{fill:var(--line)}"
    ".pipeline .sent{fill:var(--ink)}"
    f"{chart.STYLE}"
)


def write_page(found: Forecast, file: Path) -> Path:
    """Write the page. Raises UserError if it cannot be written."""
    write_file(file, page(found))
    return file


def page(found: Forecast) -> str:
    """The page as text."""
    return document(f"{found.run.name}: plan", STYLE, _body(found))


def _body(found: Forecast) -> Iterator[str]:
    yield f"<h1>{escape(found.run.name)}</h1>"
    yield f"<p>{escape(headline(found))}</p><p>{escape(model_line(found))}</p>"
    yield from (f"<p>{escape(line)}</p>" for line in found.execution.lines())
    yield f'<p class="{"good" if found.fits else "bad"}" id="verdict">{escape(found.too_much() or found.verdict())}</p>'
    yield "<table><tr><th>what</th><th>value</th><th>error</th><th>basis</th><th></th></tr>"
    yield from map(_row, found.figures)
    yield f"</table><p>Error: {escape(error_line(found))}.</p>"
    yield "<h2>Memory by pipeline rank</h2>"
    yield f'<div class="wide">{memory_bars(found.memory)}</div>'
    yield "<h2>Time of a step</h2>"
    yield f'<div class="wide">{time_bar(found)}</div>'
    yield "<h2>Pipeline</h2>"
    yield from pipeline_picture(found)
    yield "<h2>Fewer and more GPUs</h2>"
    yield f'<div class="wide">{scaling_curves(found.scaling)}</div>{scaling_table(found.scaling)}'
    yield "<h2>Assumptions</h2><ul>"
    yield from (f"<li>{escape(sentence)}</li>" for sentence in (*found.assumptions(), *found.notes))
    yield from (f"<li>{escape(line)}</li>" for line in meanings(found.figures))
    yield "</ul><details><summary>Each figure's formula with its numbers</summary><pre>"
    yield escape("\n".join(explanation(found)))
    yield "</pre></details>"


def _row(figure: Figure) -> str:
    cells = (figure.title, figure.text, figure.error_text, figure.basis)
    titles = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr data-figure="{figure.name}">{titles}<td><small>{escape(figure.formula)}</small></td></tr>'
