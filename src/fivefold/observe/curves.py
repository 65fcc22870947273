"""Curves over the steps of a run as an SVG picture, to stand in a page whose style has the colours.

A rest of the pointer shows a step's values. However many steps there are, a curve is as fine as the picture: of the
steps that share a pixel the lowest and the highest value are drawn. Imports no torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from fivefold.observe.history import Points, finite
from fivefold.pages import DARK, LIGHT, round_step, say

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 28, 24
LINE = 16
"""Height of a line of names, below TOP."""
STRIPS = 140
"""Places over which the pointer may rest."""
NAMED = 8
"""Curves that have a colour and a name at most."""
WIDE = 30.0
"""From this ratio of the highest to the lowest value on the axis is logarithmic."""


def _variables(colours: Sequence[str]) -> str:
    return "".join(f"--s{number}:{colour};" for number, colour in enumerate(colours[:NAMED]))


STYLE = "".join(
    [
        f":root{{{_variables(LIGHT)}}}@media(prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}",
        "svg text{font:11px system-ui,sans-serif;fill:var(--ink)}",
        "svg .title{font-weight:600;font-size:13px}",
        ".curve{fill:none;stroke-width:1.4;stroke-linejoin:round}",
        ".grid{stroke:var(--line)}",
        ".strip{fill:transparent}.strip:hover{fill:var(--line)}",
        ".other{stroke:var(--faint)}",
        *(f".s{number}{{stroke:var(--s{number})}}.f{number}{{fill:var(--s{number})}}" for number in range(NAMED)),
    ]
)
"""Needs the variables --ink, --line and --faint."""


@dataclass(frozen=True)
class Curve:
    """One of a picture. A picture names its first `NAMED`; the others are faint."""

    name: str
    points: Points


@dataclass(frozen=True)
class _Scale:
    """Where steps and values lie."""

    first: int
    last: int
    low: float
    high: float
    logarithmic: bool
    top: int
    """Where the highest value lies, below the names."""

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - self.first) / max(self.last - self.first, 1)

    def y(self, value: float) -> float:
        place: Callable[[float], float] = math.log if self.logarithmic else float
        share = (place(value) - place(self.low)) / (place(self.high) - place(self.low))
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - self.top) * share


def picture(title: str, curves: Sequence[Curve]) -> str:
    """The picture; empty if no curve has a finite value."""
    drawn = [Curve(curve.name, finite(curve.points)) for curve in curves]
    drawn = [curve for curve in drawn if curve.points]
    if not drawn:
        return ""
    faint, named = drawn[NAMED:], drawn[:NAMED]
    names, lines = _legend(named, len(faint))
    scale = _scale(drawn, TOP + LINE * lines)
    logarithmic = " (logarithmic)" if scale.logarithmic else ""
    return "\n".join(
        [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">',
            f'<text class="title" x="{LEFT}" y="14">{escape(title)}{logarithmic}</text>',
            *names,
            *_axes(scale),
            *(_path(curve, "other", scale) for curve in faint),
            *(_path(curve, f"s{number}", scale) for number, curve in reversed([*enumerate(named)])),
            *_strips(curves, scale),
            "</svg>",
        ]
    )


def _scale(curves: Sequence[Curve], top: int) -> _Scale:
    steps = [step for curve in curves for step, _ in curve.points]
    values = [value for curve in curves for _, value in curve.points]
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low > WIDE
    if high == low:
        room = abs(high) / 10 or 1.0
        low, high = low - room, high + room
    return _Scale(min(steps), max(steps), low, high, logarithmic, top)


def _legend(named: Sequence[Curve], faint: int) -> tuple[list[str], int]:
    """The name and the newest value of each, and in how many lines they stand."""
    parts, x, lines = [], float(LEFT), 1
    words = [f"{curve.name} {say(curve.points[-1][1])}" for curve in named] + [f"{faint} more"] * bool(faint)
    for number, text in enumerate(words):
        width = 14 + 6.1 * len(text) + 12
        if x + width > WIDTH and x > LEFT:
            x, lines = LEFT, lines + 1
        y = TOP + LINE * lines - LINE
        if number < len(named):
            parts.append(f'<rect class="f{number}" x="{x:g}" y="{y - 5}" width="10" height="10"/>')
        parts.append(f'<text x="{x + 14:g}" y="{y + 4}">{escape(text)}</text>')
        x += width
    return parts, lines


def _axes(scale: _Scale) -> list[str]:
    parts = []
    for value in _marks(scale):
        y = scale.y(value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{say(value)}</text>')
    step = max(1, round(round_step(max(scale.last - scale.first, 1) / 6)))
    for mark in range(-(-scale.first // step) * step, scale.last + 1, step):
        parts.append(f'<text x="{scale.x(mark):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{mark}</text>')
    return parts


def _marks(scale: _Scale) -> list[float]:
    """Round values between the lowest and the highest."""
    if scale.logarithmic:
        powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
        digits = (1, 2, 5) if len(powers) <= 4 else (1,)
        marks = [digit * 10.0**power for power in powers for digit in digits]
        return [mark for mark in marks if scale.low <= mark <= scale.high]
    step = round_step((scale.high - scale.low) / 5)
    return [step * number for number in range(math.ceil(scale.low / step), math.floor(scale.high / step) + 1)]


def _path(curve: Curve, style: str, scale: _Scale) -> str:
    """A line through the values; one value alone is a dot."""
    by_pixel: dict[int, Points] = defaultdict(list)
    for step, value in curve.points:
        by_pixel[round(scale.x(step))].append((step, value))
    kept = [point for points in by_pixel.values() for point in _extremes(points)]
    line = "L".join(f"{scale.x(step):.1f} {scale.y(value):.1f}" for step, value in kept)
    dot = "h0.1" if len(kept) == 1 else ""
    cap = ' stroke-linecap="round" stroke-width="5"' if dot else ""
    return f'<path class="curve {style}"{cap} d="M{line}{dot}"><title>{escape(curve.name)}</title></path>'


def _extremes(points: Points) -> Points:
    """The lowest and the highest, in the order of steps."""
    ends = {min(points, key=lambda point: point[1]), max(points, key=lambda point: point[1])}
    return sorted(ends)


def _strips(curves: Sequence[Curve], scale: _Scale) -> list[str]:
    """Places for the pointer, each with the values of the newest step in it, those too that are not finite."""
    values: dict[int, dict[str, float]] = defaultdict(dict)
    for curve in curves:
        for step, value in curve.points:
            values[step][curve.name] = value
    width = (WIDTH - LEFT - RIGHT) / STRIPS
    shown = {int((scale.x(step) - LEFT) / width): step for step in sorted(values)}
    parts = []
    for place, step in shown.items():
        highest = sorted(values[step].items(), key=lambda named: -named[1])[:NAMED]
        words = "".join(f"\n{name} {say(value)}" for name, value in highest)
        x, height = LEFT + width * place - width / 2, HEIGHT - scale.top - BOTTOM
        parts.append(
            f'<rect class="strip" x="{x:.1f}" y="{scale.top}" width="{width:.1f}" height="{height}">'
            f"<title>step {step}{escape(words)}</title></rect>"
        )
    return parts
