"""What a person at the terminal sees of a run: one live line on a terminal, now and then a line in a log file.

Everything goes to standard error, so that standard output belongs to a command's result. On a terminal the live line
is tqdm's, and messages scroll above it. Elsewhere a line comes every few seconds at most, beside each validation and
message with the step that it follows, and the last step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TextIO


class Console(Protocol):
    """Shows steps, validations and messages."""

    def step(self, fields: Mapping[str, Any]) -> None:
        """Show a step's measurements (`fivefold.observe.metrics.StepRecord`)."""

    def message(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Show what is still held back and leave the terminal tidy."""


class NoConsole:
    """Shows nothing: what is left when the terminal has gone."""

    def step(self, fields: Mapping[str, Any]) -> None:
        """Nothing."""

    def message(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def open_console(total_steps: int, start_step: int, stream: TextIO | None = None) -> Console:
    """The live line if `stream` (standard error unless given) is a terminal, plain lines otherwise."""
    stream = sys.stderr if stream is None else stream
    if _has_size(stream):
        return LiveConsole(total_steps, start_step, stream)
    return PlainConsole(total_steps, stream)


def _has_size(stream: TextIO) -> bool:
    """Whether `stream` is a terminal to draw on; some (a container's, without a window) say they have no rows."""
    try:
        size = os.get_terminal_size(stream.fileno())
    except OSError:
        return False
    return size.columns > 0 and size.lines > 0


class LiveConsole:
    """One line that is drawn over, with a bar; messages stay above it."""

    def __init__(self, total_steps: int, start_step: int, stream: TextIO) -> None:
        from tqdm import tqdm

        self._stream = stream
        self._pace = Pace(total_steps)
        self._bar = tqdm(
            total=total_steps,
            initial=start_step,
            file=stream,
            dynamic_ncols=True,
            mininterval=0.2,
            bar_format="step {n_fmt}/{total_fmt} {bar:16} {desc}",
        )

    def step(self, fields: Mapping[str, Any]) -> None:
        """Redraw, at most five times a second."""
        remaining = self._pace.remaining_s(fields["step"])
        self._bar.set_description_str(describe(fields, remaining), refresh=False)
        self._bar.update(fields["step"] - self._bar.n)

    def message(self, text: str) -> None:
        """A line above the bar."""
        self._bar.write(text, file=self._stream)

    def close(self) -> None:
        """Draw the last state and leave it standing."""
        self._bar.refresh()
        self._bar.close()


class PlainConsole:
    """Lines for a log: a step at most every `interval_s` seconds, beside the last one and those before a message."""

    def __init__(
        self,
        total_steps: int,
        stream: TextIO,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total_steps
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._pace = Pace(total_steps, clock)
        self._next = clock()
        self._held: str | None = None

    def step(self, fields: Mapping[str, Any]) -> None:
        """Print the line, or hold it back if one was printed a moment ago."""
        remaining = self._pace.remaining_s(fields["step"])
        self._held = f"step {fields['step']}/{self._total}  {describe(fields, remaining)}"
        if self._clock() >= self._next:
            self._print_held()

    def message(self, text: str) -> None:
        """Print a line, after the newest step if that was held back."""
        self._print_held()
        self._print(text)

    def close(self) -> None:
        """Print the newest step if it was held back."""
        self._print_held()

    def _print_held(self) -> None:
        if self._held is not None:
            self._print(self._held)
            self._held = None
            self._next = self._clock() + self._interval_s

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class Pace:
    """Estimates the time that is left from the steps of this start; the first, which may compile, is not counted."""

    def __init__(self, total_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total_steps
        self._from = 0
        self._clock = clock
        self._since: float | None = None

    def remaining_s(self, step: int) -> float | None:
        """Seconds to the last step, now that `step` is done; None until two steps are."""
        now = self._clock()
        if self._since is None:
            self._from, self._since = step, now
        if step <= self._from:
            return None
        return (now - self._since) / (step - self._from) * (self._total - step)


def describe(fields: Mapping[str, Any], remaining_s: float | None) -> str:
    """A step's measurements in one line, such as `loss 5.2134  norm 0.84  lr 3.00e-04  12.3k tok/s  left 1:02`."""
    parts = [f"loss {fields['loss']:.4f}", f"norm {fields['grad_norm']:.2f}", f"lr {fields['lr']:.2e}"]
    if "moe_load_max" in fields:
        parts.append(f"max load {fields['moe_load_max']:.2f}")
    parts.append(f"{short(fields['tok_per_s'])} tok/s")
    if fields.get("mfu") is not None:
        parts.append(f"mfu {fields['mfu']:.1%}")
    if fields.get("mem_peak_gib") is not None:
        parts.append(f"{fields['mem_peak_gib']:.1f} GiB")
    if remaining_s is not None:
        parts.append(f"left {clock_time(remaining_s)}")
    return "  ".join(parts)


def describe_validation(step: int, losses: Mapping[str, float]) -> str:
    """Validation in one line, such as `step 100  validation: stdlib 4.8123`."""
    return f"step {step}  validation: " + "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())


def short(number: float) -> str:
    """Three digits and a unit: 987, 12.3k, 4.56M."""
    unit, scaled = "", number
    for larger in ("k", "M", "G", "T"):
        if scaled < 999.5:
            break
        unit, scaled = larger, scaled / 1000
    decimals = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{decimals}f}{unit}"


def clock_time(seconds: float) -> str:
    """M:SS, H:MM:SS from an hour, and days from a day on: 0:07, 1:02:03, 2d 03:04."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
