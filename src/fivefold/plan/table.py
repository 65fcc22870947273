"""Rows of text as aligned columns, the way in which every table of the commands is printed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

FIRST, LAST = 16, 8
"""Rows of a long table that are shown."""


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line a row, the first row as their head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def long_table_lines(head: Sequence[str], row: Callable[[int], Sequence[str]], count: int, what: str) -> list[str]:
    """As `table_lines`, of the rows 0 to count - 1; of many the first and the last, and a line on how many more."""
    left_out = count - FIRST - LAST
    if left_out <= 1:
        return table_lines([head, *map(row, range(count))])
    lines = table_lines([head, *map(row, range(FIRST)), *map(row, range(count - LAST, count))])
    lines.insert(1 + FIRST, f"... {left_out:,} more {what}; --json has them all ...")
    return lines
