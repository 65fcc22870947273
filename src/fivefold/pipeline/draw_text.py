"""A timeline as text: a row a rank, as wide as a terminal, that can be read without colours.

An action is its kind's letter and its microbatch, small letters for the second, fourth, ... chunk of a rank, and dashes
as long as it runs. `~` is a rank that computes nothing while something travels from or to it, `.` one that is idle.
Imports no torch.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import click

from fivefold.pipeline.draw import NAMES, Panel
from fivefold.pipeline.schedule import KINDS
from fivefold.pipeline.timeline import Span

COLOURS = {"F": ("white", "blue"), "I": ("black", "yellow"), "W": ("black", "green"), "B": ("white", "red")}
"""Of the text and of what is behind it."""
_RUN = re.compile(r"[FIWB][^FIWB~.]*", re.IGNORECASE)
_FEWEST_CELLS = 10

Owner = int | str
"""Whom a cell shows: the number of a span, or the sign of communication or idleness."""


class _Part(NamedTuple):
    owner: Owner
    start: float
    end: float


def text_rows(panel: Panel, width: int, until: float) -> list[str]:
    """One row a rank of `width` columns (more if that is too few to show anything), from 0 to the time `until`."""
    label = len(str(len(panel.timeline.spans) - 1))
    cells = max(width - label - 1, _FEWEST_CELLS)
    travels = _travels(panel)
    return [
        f"{rank:>{label}} {_row(panel, spans, travels[rank], cells, until)}"
        for rank, spans in enumerate(panel.timeline.spans)
    ]


def legend(panels: Sequence[Panel]) -> str:
    """What the letters and signs of these panels stand for, in one line."""
    timelines = [panel.timeline for panel in panels]
    used = {span.action.kind for timeline in timelines for spans in timeline.spans for span in spans}
    words = [f"{kind} {NAMES[kind]}" for kind in KINDS if kind in used]
    if any(panel.chunks > 1 for panel in panels):
        words.append("small letters: every second stage of a rank")
    if any(timeline.transfers for timeline in timelines):
        words.append("~ communication")
    return ", ".join([*words, ". idle"])


def painted(row: str) -> str:
    """A row of `text_rows` with colours for each action."""
    return _RUN.sub(lambda run: _painted_action(run[0]), row)


def _painted_action(text: str) -> str:
    ink, paper = COLOURS[text[0].upper()]
    return (
        click.style(text, fg=ink, bg=paper)
        if text[0].isupper()
        else click.style(text, fg="black", bg=f"bright_{paper}")
    )


def _row(panel: Panel, spans: tuple[Span, ...], travels: list[tuple[float, float]], cells: int, until: float) -> str:
    owners = _owners(_parts(spans, travels), cells, until / cells)
    return "".join(_run(panel, spans, owner, len(list(run))) for owner, run in groupby(owners))


def _run(panel: Panel, spans: tuple[Span, ...], owner: Owner, length: int) -> str:
    """What stands in the `length` cells in which one part is shown."""
    if isinstance(owner, str):
        return owner * length
    kind, stage, microbatch = spans[owner].action
    letter = kind.lower() if panel.chunk[stage] % 2 else kind
    text = f"{letter}{microbatch}"
    return (text if len(text) <= length else letter).ljust(length, "-")


def _parts(spans: tuple[Span, ...], travels: list[tuple[float, float]]) -> Iterator[_Part]:
    """A rank's actions, and the communication between them."""
    yield from (_Part(number, span.start, span.end) for number, span in enumerate(spans))
    edges = [0.0, *(edge for span in spans for edge in span[1:]), float("inf")]
    gaps = [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end > start]
    position = 0
    for start, end in travels:
        while gaps[position][1] <= start:
            position += 1
        following = position
        while following < len(gaps) and gaps[following][0] < end:
            yield _Part("~", max(start, gaps[following][0]), min(end, gaps[following][1]))
            following += 1


def _travels(panel: Panel) -> dict[int, list[tuple[float, float]]]:
    """Of each rank: when something travels from or to it; in ascending order, without overlaps."""
    found = defaultdict(list)
    for transfer in panel.timeline.transfers:
        for rank in (transfer.source, transfer.target):
            found[rank].append((transfer.start, transfer.end))
    return defaultdict(list, {rank: list(_joined(sorted(times))) for rank, times in found.items()})


def _joined(times: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The same stretches of time, those that touch as one."""
    begun, ends = None, 0.0
    for start, end in times:
        if begun is not None and start > ends:
            yield begun, ends
            begun = None
        begun, ends = (start, end) if begun is None else (begun, max(end, ends))
    if begun is not None:
        yield begun, ends


def _owners(parts: Iterable[_Part], cells: int, cell: float) -> list[Owner]:
    """Of each cell: what fills most of it, actions together against communication and idleness, then the longest."""
    action: list[tuple[float, Owner]] = [(0.0, ".")] * cells
    busy, travelling = [0.0] * cells, [0.0] * cells
    for owner, start, end in parts:
        for number in range(min(int(start / cell), cells - 1), cells):
            overlap = min(end, (number + 1) * cell) - max(start, number * cell)
            if overlap <= 0:
                break
            if owner == "~":
                travelling[number] += overlap
            else:
                busy[number] += overlap
                if overlap > action[number][0]:
                    action[number] = (overlap, owner)
    owners: list[Owner] = []
    for number in range(cells):
        idle = cell - busy[number] - travelling[number]
        most = max(busy[number], travelling[number], idle)
        owners.append(action[number][1] if busy[number] == most else "~" if travelling[number] == most else ".")
    return owners
