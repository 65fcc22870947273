"""The memory of each pipeline rank as a bar by category, with the capacity as a line. Imports no torch."""

from __future__ import annotations

from html import escape

from fivefold.pages import round_step, say
from fivefold.plan.memory.peak import CATEGORIES, GIB, Memory
from fivefold.plan.page.chart import chart, legend, text

LEFT, WIDTH, RIGHT = 64, 760, 150
ROW, GAP = 18, 4
BESIDE = len(CATEGORIES)
"""The colour of what lies beside tensors, after those of the categories."""


def memory_bars(memory: Memory) -> str:
    """A row a rank."""
    used = [name for name in CATEGORIES if any(rank.parts.get(name) for rank in memory.ranks)]
    numbers = {name: number for number, name in enumerate(CATEGORIES)}
    names = [(numbers[name], name.replace("_", " ")) for name in used]
    parts, top = legend([*names, (BESIDE, "beside tensors")], LEFT, WIDTH, 4)
    most = max(memory.capacity, *(rank.needed for rank in memory.ranks))
    scale = WIDTH / most
    first = top
    for rank in memory.ranks:
        x = float(LEFT)
        parts.append(text(f"rank {rank.pp}", LEFT - 8, top + 13, "end"))
        beside = ("beside tensors", rank.overhead.context, BESIDE)
        for name, size, colour in [*((name, rank.parts.get(name, 0.0), numbers[name]) for name in used), beside]:
            width = size * scale
            if width:
                words = f"pipeline rank {rank.pp}, {name.replace('_', ' ')}: {size / GIB:.2f} GiB"
                parts.append(
                    f'<rect class="c{colour}" data-rank="{rank.pp}" data-part="{name}" x="{x:.2f}" y="{top:g}" '
                    f'width="{width:.2f}" height="{ROW}"><title>{escape(words)}</title></rect>'
                )
            x += width
        mark = ", fullest" if rank is memory.worst else ""
        parts.append(
            text(f"{rank.allocated / GIB:.2f} GiB{mark}", max(x, LEFT + memory.capacity * scale) + 6, top + 13)
        )
        top += ROW + GAP
    limit = LEFT + memory.capacity * scale
    parts.append(
        f'<path class="limit" data-capacity="{memory.capacity / GIB:.2f}" d="M{limit:.2f} {first - 4:g}V{top:g}"/>'
    )
    parts += _axis(most, scale, top)
    parts.append(text(f"capacity {memory.capacity / GIB:.2f} GiB", limit, top + 30, "end"))
    return chart(LEFT + WIDTH + RIGHT, top + 38, "memory by pipeline rank", parts)


def _axis(most: float, scale: float, top: float) -> list[str]:
    step = round_step(most / GIB / 8)
    marks = range(int(most / GIB / step) + 1)
    return [text(say(step * mark), LEFT + step * mark * GIB * scale, top + 14, "middle") for mark in marks]
