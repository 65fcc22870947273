"""Timelines as one SVG picture: a row a rank on one time scale, and below each timeline the activations that are held.

Actions are boxes with a title that a browser shows under the pointer; transfers are a thin black line under the row of
the rank that receives. Very many actions are drawn without titles, to the half pixel, and the picture says so. Imports
no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from fivefold.pages import round_step, say
from fivefold.pipeline.draw import NAMES, Panel, last_end
from fivefold.pipeline.draw_colours import COMMUNICATION, HELD, IDLE, ink, shade
from fivefold.pipeline.schedule import KINDS, Action
from fivefold.pipeline.timeline import Span, Transfer

TITLES_AT_MOST = 12_000
"""Actions that get a box with a title each; a browser moves through so many without delay."""
WIDTH = 1100
LEFT, RIGHT = 64, 56
ROW, LINE, GAP, CURVE = 18, 3, 4, 18
"""Heights: of a row's boxes, of its transfers, between rows, of a rank's curve of activations."""
DIGIT = 5.4
"""Width of a digit in a box."""


@dataclass(frozen=True)
class _Scale:
    """Where a time lies in the picture."""

    width: int
    until: float
    grid: float
    """Of what edges are multiples, in pixels."""
    dense: bool
    """Whether there are too many actions for a box with a title each."""

    def x(self, time: float) -> float:
        return self.grid * round((LEFT + (self.width - LEFT - RIGHT) * time / self.until) / self.grid)


def svg(panels: Sequence[Panel], width: int = WIDTH) -> str:
    """The picture of `panels`, `width` pixels wide, as a file of its own or as a part of a page."""
    count = sum(len(spans) for panel in panels for spans in panel.timeline.spans)
    dense = count > TITLES_AT_MOST
    scale = _Scale(width, last_end(panels), 0.5 if dense else 0.1, dense)
    body = [_legend(panels, scale)]
    top = 44
    for panel in panels:
        lines, top = _panel(panel, scale, top)
        body += lines
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top}" viewBox="0 0 {width} {top}">',
            f"<style>{_style(panels)}</style>",
            f'<rect class="paper" width="{width}" height="{top}"/>',
            *body,
            "</svg>\n",
        ]
    )


def comfortable_width(panels: Sequence[Panel]) -> int:
    """A width at which the number of a microbatch fits into a box of mean length, if it can be had on a screen."""
    spans = [span for panel in panels for row in panel.timeline.spans for span in row]
    mean = sum(span.end - span.start for span in spans) / max(len(spans), 1)
    wanted = 14 * last_end(panels) / mean if mean else WIDTH
    return round(min(max(wanted, WIDTH), 3 * WIDTH))


def _style(panels: Sequence[Panel]) -> str:
    """The classes: `F0` is a forward of a rank's first chunk, `tF0` the text on it."""
    chunks = max((panel.chunks for panel in panels), default=1)
    rules = [
        "text{font:11px system-ui,sans-serif;fill:#222}",
        ".title{font-weight:600;font-size:13px}",
        ".paper{fill:#fff}",
        f".idle{{fill:{IDLE}}}",
        f".sent{{fill:{COMMUNICATION}}}",
        f".held{{fill:{HELD}}}",
        ".tick{stroke:#bbb}",
        "g text{font-size:9px;text-anchor:middle;pointer-events:none}",
    ]
    for kind in KINDS:
        for chunk in range(chunks):
            colour = shade(kind, chunk, chunks)
            rules += [f".{kind}{chunk}{{fill:{colour}}}", f"g .t{kind}{chunk}{{fill:{ink(colour)}}}"]
    return "".join(rules)


def _legend(panels: Sequence[Panel], scale: _Scale) -> str:
    """What each colour stands for, in one line: only what there is."""
    used = {span.action.kind for panel in panels for spans in panel.timeline.spans for span in spans}
    chunks = max((panel.chunks for panel in panels), default=1)
    entries = [
        ([f"{kind}{chunk}" for chunk in range(chunks)], f"{kind} {NAMES[kind]}") for kind in KINDS if kind in used
    ]
    if any(_lasting(panel) for panel in panels):
        entries.append((["sent"], "communication"))
    entries.append((["idle"], "idle"))
    if scale.dense:
        entries.append(([], f"more than {TITLES_AT_MOST:,} actions: those under half a pixel are left out"))
    if chunks > 1:
        entries.append(([], "lighter: later chunks of a rank"))
    parts, x = [], float(LEFT)
    for classes, words in entries:
        for name in classes:
            height, y = (LINE, 16) if name == "sent" else (12, 10)
            parts.append(f'<rect class="{name}" x="{x:g}" y="{y}" width="12" height="{height}"/>')
            x += 14
        parts.append(f'<text x="{x + 3:g}" y="20">{words}</text>')
        x += 3 + 5.9 * len(words) + 14
    return "".join(parts)


def _panel(panel: Panel, scale: _Scale, top: int) -> tuple[list[str], int]:
    """The parts of one timeline, and where the next one begins."""
    timeline = panel.timeline
    sent = _lasting(panel)
    pitch = ROW + (LINE if sent else 0) + GAP
    numbers = ", ".join(f"{name} {value}" for name, value in panel.numbers()[:3])
    parts = [
        f'<text class="title" x="{LEFT}" y="{top}">{escape(panel.title)}</text>',
        f'<text x="{LEFT}" y="{top + 16}">{escape(numbers)}</text>',
    ]
    top += 26
    for rank, spans in enumerate(timeline.spans):
        parts.append(_left(f"rank {rank}", top + 13))
        parts.append(f'<g transform="translate(0 {top})">{_idle(panel, scale, ROW)}')
        received = [transfer for transfer in sent if transfer.target == rank]
        if scale.dense:
            parts += _areas(panel, spans, received, scale)
        else:
            parts += _boxes(panel, spans, scale)
            parts += _lines(panel, received, scale)
        parts.append("</g>")
        top += pitch
    parts.append(_axis(panel, scale, top))
    top += 34
    most = max(timeline.peak, default=0.0)
    parts.append(f'<text x="{LEFT}" y="{top}">activations held, at most {say(most)} (of one whole rank)</text>')
    top += 8
    for rank, peak in enumerate(timeline.peak):
        parts.append(_left(f"rank {rank}", top + 13))
        parts.append(
            f'<g transform="translate(0 {top})">{_idle(panel, scale, CURVE)}{_curve(panel, rank, most, scale)}</g>'
        )
        parts.append(f'<text x="{scale.x(timeline.makespan) + 6:g}" y="{top + 13}">{say(peak)}</text>')
        top += CURVE + GAP
    return parts, top + 30


def _lasting(panel: Panel) -> list[Transfer]:
    """The transfers that take time."""
    return [transfer for transfer in panel.timeline.transfers if transfer.end > transfer.start]


def _left(words: str, y: float) -> str:
    return f'<text x="{LEFT - 8}" y="{y:g}" text-anchor="end">{words}</text>'


def _idle(panel: Panel, scale: _Scale, height: int) -> str:
    x = scale.x(0)
    return f'<rect class="idle" x="{x:g}" width="{scale.x(panel.timeline.makespan) - x:.1f}" height="{height}"/>'


def _boxes(panel: Panel, spans: Sequence[Span], scale: _Scale) -> Iterator[str]:
    """A rank's actions, a box each, with the microbatch's number where there is room."""
    for action, start, end in spans:
        x = scale.x(start)
        width = scale.x(end) - x
        width = max(width - 0.5 if width > 3 else width, 0.1)
        name = _class(panel, action)
        yield (
            f'<rect class="{name}" x="{x:g}" width="{width:.1f}" height="{ROW}">'
            f"<title>{action}: {say(start)} to {panel.time(end)}</title></rect>"
        )
        number = str(action.microbatch)
        if width > DIGIT * len(number) + 1:
            yield f'<text class="t{name}" x="{x + width / 2:.1f}" y="12.5">{number}</text>'


def _lines(panel: Panel, received: Sequence[Transfer], scale: _Scale) -> Iterator[str]:
    """What arrives at a rank."""
    for source, _, action, start, end in received:
        x = scale.x(start)
        yield (
            f'<rect class="sent" x="{x:g}" y="{ROW}" width="{max(scale.x(end) - x, 0.8):.1f}" height="{LINE}">'
            f"<title>{action} from rank {source}: {say(start)} to {panel.time(end)}</title></rect>"
        )


def _areas(panel: Panel, spans: Sequence[Span], received: Sequence[Transfer], scale: _Scale) -> Iterator[str]:
    """The same as one area a class, which takes a tenth of the room."""
    areas: dict[str, list[str]] = defaultdict(list)
    for action, start, end in spans:
        if width := scale.x(end) - scale.x(start):
            areas[_class(panel, action)].append(f"M{scale.x(start):g} 0h{width:g}v{ROW}h{-width:g}z")
    last = -1.0
    for *_, start, end in sorted(received, key=lambda transfer: transfer.start):
        x = scale.x(start)
        if x > last:
            last = max(scale.x(end), x + scale.grid)
            areas["sent"].append(f"M{x:g} {ROW}h{last - x:g}v{LINE}h{x - last:g}z")
    for name, paths in areas.items():
        yield f'<path class="{name}" d="{"".join(paths)}"/>'


def _class(panel: Panel, action: Action) -> str:
    return f"{action.kind}{panel.chunk[action.stage]}"


def _axis(panel: Panel, scale: _Scale, top: int) -> str:
    """Marks at round times up to the panel's end."""
    step = round_step(scale.until / 10)
    parts = []
    for number in range(int(panel.timeline.makespan / step) + 1):
        x = scale.x(number * step)
        parts.append(
            f'<path class="tick" d="M{x:g} {top}v4"/><text x="{x - 3:g}" y="{top + 15}">{say(number * step)}</text>'
        )
    if panel.unit:
        parts.append(f'<text x="{scale.x(panel.timeline.makespan) + 6:g}" y="{top + 15}">{panel.unit}</text>')
    return "".join(parts)


def _curve(panel: Panel, rank: int, most: float, scale: _Scale) -> str:
    """A rank's activations over time, as an area under `most`; within half a pixel the highest counts."""
    held = panel.timeline.held(rank)
    points: list[tuple[float, float]] = []
    now = 0.0
    for when, much in [*held, (panel.timeline.makespan, held[-1][1])]:
        x = scale.x(when)
        if points and x - points[-1][0] < 0.5:
            points[-1] = (points[-1][0], max(points[-1][1], much))
        else:
            if points and points[-1][1] != now:
                points.append((points[-1][0] + 0.5, now))
            points.append((x, much))
        now = much
    steps = "".join(f"H{x:g}V{CURVE - (CURVE - 2) * much / (most or 1):.4g}" for x, much in points)
    return f'<path class="held" d="M{scale.x(0):g} {CURVE}{steps}V{CURVE}z"><title>rank {rank}</title></path>'
