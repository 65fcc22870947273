"""The same run on other numbers of GPUs: calendar days and efficiency as curves, and as a table. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import log2

from fivefold.pages import round_step, say
from fivefold.plan.figures import ENDLESS
from fivefold.plan.page.chart import chart, text
from fivefold.plan.quantities import count, percent, time
from fivefold.plan.scaling import Point

HEAD = ("GPUs", "dp", "time of a step", "calendar days", "GPU-hours to pay", "efficiency", "")
WIDTH, HEIGHT = 420, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 28, 28


def scaling_curves(points: Sequence[Point]) -> str:
    """Days, and tokens a second and GPU relative to the run as it is, against GPUs on a logarithmic axis."""
    days = [(point.gpus, point.calendar_days) for point in points if point.calendar_days is not None]
    shares = [(point.gpus, point.efficiency) for point in points if point.efficiency is not None]
    return _curve("calendar days", days, 0, say) + _curve(
        "efficiency: tokens/s a GPU, of this run's", shares, 1, percent
    )


def _curve(title: str, points: Sequence[tuple[int, float]], colour: int, say_value: Callable[[float], str]) -> str:
    if not points:
        return ""
    first, last = points[0][0], points[-1][0]
    high = max(value for _, value in points)
    step = round_step(high / 4)

    def x(gpus: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log2(gpus / first) / log2(last / first) if last > first else 0.5)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / high

    parts = [text(title, LEFT, 14, style="name")]
    for mark in range(int(high / step) + 1):
        parts.append(f'<path class="axis" d="M{LEFT} {y(step * mark):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(text(say_value(step * mark), LEFT - 6, y(step * mark) + 4, "end"))
    line = "L".join(f"{x(gpus):.1f} {y(value):.1f}" for gpus, value in points)
    parts.append(f'<path class="line l{colour}" d="M{line}"/>')
    for gpus, value in points:
        words = f"{gpus:,} GPUs: {say_value(value)}"
        parts.append(
            f'<circle class="c{colour}" data-gpus="{gpus}" cx="{x(gpus):.1f}" cy="{y(value):.1f}" r="4">'
            f"<title>{escape(words)}</title></circle>"
        )
        parts.append(text(f"{gpus:,}", x(gpus), HEIGHT - 8, "middle"))
    return chart(WIDTH, HEIGHT, f"{title} against GPUs", parts)


def scaling_table(points: Sequence[Point]) -> str:
    """A row a number of GPUs."""
    rows = "".join(f'<tr data-gpus="{point.gpus}">{"".join(_cells(point))}</tr>' for point in points)
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _cells(point: Point) -> list[str]:
    if point.step_seconds is None or point.efficiency is None:
        return [f"<td>{point.gpus:,}</td><td>{point.dp:,}</td>", f'<td colspan="5">{escape(point.why or "")}</td>']
    words = (
        f"{point.gpus:,}",
        f"{point.dp:,}",
        time(point.step_seconds),
        ENDLESS if point.calendar_days is None else f"{point.calendar_days:.4g}",
        "" if point.paid_gpu_hours is None else count(point.paid_gpu_hours),
        percent(point.efficiency),
        "" if point.fits else "does not fit",
    )
    return [f"<td>{word}</td>" for word in words]
