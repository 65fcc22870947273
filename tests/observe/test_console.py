"""The console: a live line on a terminal, few lines in a log."""

from __future__ import annotations

import io
import os
import pty
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from fivefold.observe.console import LiveConsole, Pace, PlainConsole, clock_time, describe, open_console, short


class Clock:
    """Time that passes when a test says so, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def record(step: int, **changes: float | None) -> dict[str, float | None]:
    fields: dict[str, float | None] = {"step": step, "tokens": 2048 * step, "loss": 5.21337, "grad_norm": 0.842}
    rates: dict[str, float | None] = {"lr": 3e-4, "step_s": 0.17, "tok_per_s": 12345.6, "tok_per_s_gpu": 6172.8}
    return fields | rates | {"mfu": None, "mem_peak_gib": 0.52} | changes


@contextmanager
def terminal(rows: int, columns: int) -> Iterator[TextIO]:
    """A real terminal of that size, as standard error would be."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (rows, columns))
    with os.fdopen(theirs, "w") as stream, os.fdopen(ours, "r"):
        yield stream


def test_a_terminal_gets_the_live_line_and_a_file_plain_lines(tmp_path: Path) -> None:
    with terminal(rows=30, columns=100) as stream:
        console = open_console(10, 0, stream)
        console.close()
        assert isinstance(console, LiveConsole)
    with (tmp_path / "log").open("w") as stream:
        assert isinstance(open_console(10, 0, stream), PlainConsole)


def test_a_terminal_without_a_window_gets_plain_lines() -> None:
    with terminal(rows=0, columns=0) as stream:
        assert isinstance(open_console(10, 0, stream), PlainConsole)


def test_plain_lines_come_at_most_once_an_interval_and_the_last_step_always() -> None:
    stream, clock = io.StringIO(), Clock()
    console = PlainConsole(100, stream, interval_s=5.0, clock=clock)
    for step in range(1, 101):
        console.step(record(step))
        clock.now += 0.25
    console.close()
    shown = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert shown == ["1/100", "21/100", "41/100", "61/100", "81/100", "100/100"]


def test_a_message_is_printed_at_once_after_the_step_that_it_follows() -> None:
    stream = io.StringIO()
    console = PlainConsole(100, stream, interval_s=5.0, clock=Clock())
    for step in (1, 2, 3):
        console.step(record(step))
    console.message("saved 3")
    console.message("finished")
    console.close()
    shown = [" ".join(line.split()[:2]) for line in stream.getvalue().splitlines()]
    assert shown == ["step 1/100", "step 3/100", "saved 3", "finished"]


def test_the_live_line_shows_progress_and_keeps_messages_above_it() -> None:
    stream = io.StringIO()
    console = LiveConsole(300, 100, stream)
    console.step(record(120))
    console.message("step 120  validation: stdlib 4.8123")
    console.close()
    text = stream.getvalue()
    assert "step 100/300" in text, "a resumed run starts where it left off"
    assert "step 120  validation: stdlib 4.8123\n" in text
    assert text.rstrip().splitlines()[-1].endswith("loss 5.2134  norm 0.84  lr 3.00e-04  12.3k tok/s  0.5 GiB")
    assert "step 120/300" in text.rstrip().splitlines()[-1]


def test_mfu_is_shown_where_it_is_known() -> None:
    assert "mfu 41.3%" in describe(record(1, mfu=0.4129), None)
    assert "mfu" not in describe(record(1, mfu=None), None)


def test_the_largest_load_is_shown_where_there_are_experts() -> None:
    assert "norm 0.84  lr 3.00e-04  max load 1.47  12.3k tok/s" in describe(record(1, moe_load_max=1.4688), None)
    assert "load" not in describe(record(1), None)


def test_the_time_left_leaves_out_the_first_step_which_may_compile() -> None:
    clock = Clock()
    pace = Pace(10, clock)
    clock.now = 60.0
    assert pace.remaining_s(1) is None
    clock.now = 62.0
    assert pace.remaining_s(2) == pytest.approx(16.0)
    clock.now = 65.0
    assert pace.remaining_s(4) == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0.00"), (9.994, "9.99"), (9.996, "10.0"), (987.4, "987"), (12345.6, "12.3k"), (999.7e3, "1.00M")],
)
def test_rates_have_three_digits(number: float, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (3723, "1:02:03"), (183_840, "2d 03:04")]
)
def test_times_read_as_a_clock(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text
