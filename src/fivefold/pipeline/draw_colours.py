"""The colours of the picture, which people with any kind of colour vision tell apart; tests measure that.

A rank's second and later chunks are lighter shades of the same colour. Imports no torch.
"""

from __future__ import annotations

from fivefold.pipeline.schedule import Kind

ACTION: dict[Kind, str] = {"F": "#3b6fd6", "I": "#ffc02e", "W": "#1fb877", "B": "#8f1230"}
COMMUNICATION = "#000000"
IDLE = "#f1f1f1"
HELD = "#6f5aa8"
"""Of the activations held."""
LIGHTEST = 0.35
"""Share of white in the last chunk's shade."""


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of an action of the rank's stage number `chunk` of `chunks`."""
    white = LIGHTEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in channels(ACTION[kind]))


def ink(colour: str) -> str:
    """Black or white, whichever is read more easily on `colour`."""
    red, green, blue = channels(colour)
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 120 else "#fff"


def channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`, 0 to 255."""
    red, green, blue = bytes.fromhex(colour[1:])
    return red, green, blue
