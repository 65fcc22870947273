"""Lengths of time as people write them: `90s`, `30min`, `2h`."""

from __future__ import annotations

import re

from fivefold.errors import UserError

SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float:
    """Seconds of a duration such as "90s", "30min", "1.5h" or "2 d". Raises UserError for what is none, or is zero."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip())
    if match is None or match[2] not in SECONDS or float(match[1]) <= 0:
        raise UserError(f"{text!r} is no duration; write one as 90s, 30min, 2h or 1d")
    return float(match[1]) * SECONDS[match[2]]
