"""A schedule as text: the CSV files of torch.distributed.pipelining, one line a rank, both ways.

Idle slots are empty cells. What torch's files say about communication and sharding is left out, since it follows from
the actions. Whether a schedule is sound is not asked here but in check.py. Imports no torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

from fivefold.errors import UserError
from fivefold.pipeline.schedule import PAIR, Action, Kind, Pair, Schedule, Step, actions_of

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_PAIR = re.compile(rf"\(([^;()]*);([^;()]*)\){PAIR}")
_DERIVED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)", re.ASCII)
"""What torch adds to the actions when it lowers a schedule, and what the executor derives by itself."""


def to_csv(schedule: Schedule) -> str:
    """The text of `schedule`, which torch reads as its format `compute_only`."""
    return "".join(",".join(map(str, steps)) + "\n" for steps in schedule.ranks)


def read_csv(path: Path) -> Schedule:
    """The schedule in a file, with a byte order mark before it or not.

    Raises OSError if the file cannot be read, UserError if it holds no text, or as `from_csv`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text: {error}") from error
    return from_csv(text, path.name)


def from_csv(text: str, name: str) -> Schedule:
    """The schedule that `text` holds, in either of torch's formats; a stage is on the rank whose line has its actions.

    `name` is what the schedule is called, and the file in a message. Raises UserError naming line, cell and action:
    text that is no action, a stage on two lines, a stage, microbatch or line without
    actions.
    """
    ranks: list[tuple[Step, ...]] = []
    placement: dict[int, int] = {}
    for rank, line in enumerate(text.rstrip().splitlines()):
        steps: list[Step] = []
        for cell, content in enumerate(line.split(","), start=1):
            place = f"{name}, line {rank + 1}, cell {cell}"
            step = _step(content.strip(), place)
            if step is None:
                continue
            for action in actions_of(step):
                if placement.setdefault(action.stage, rank) != rank:
                    raise UserError(
                        f"{place}: {action} is of stage {action.stage}, whose other actions are on line "
                        f"{placement[action.stage] + 1}; a stage belongs to one rank"
                    )
            steps.append(step)
        if not steps:
            raise UserError(
                f"{name}, line {rank + 1}: no actions; every rank has a line with the actions of its stages"
            )
        ranks.append(tuple(steps))
    if not ranks:
        raise UserError(f"{name}: no actions; a schedule has a line a rank, such as 0F0,0F1,0B0,0B1")
    stages = max(placement) + 1
    if len(placement) < stages:
        missing = next(stage for stage in range(stages) if stage not in placement)
        raise UserError(
            f"{name}: stage {missing} has no actions, though there are some of stage {stages - 1} on line "
            f"{placement[stages - 1] + 1}; stages count from 0 without a gap"
        )
    numbers = {action.microbatch for steps in ranks for step in steps for action in actions_of(step)}
    microbatches = max(numbers) + 1
    if len(numbers) < microbatches:
        missing = next(number for number in range(microbatches) if number not in numbers)
        raise UserError(
            f"{name}: microbatch {missing} has no actions, though there are some of microbatch {microbatches - 1}; "
            "microbatches count from 0 without a gap"
        )
    return Schedule(name, tuple(ranks), tuple(placement[stage] for stage in range(stages)), microbatches)


def _step(text: str, place: str) -> Step | None:
    """The step that one cell holds; None if it is idle or derived."""
    if not text or _DERIVED.fullmatch(text):
        return None
    if match := _PAIR.fullmatch(text):
        forward, backward = (_action(part.strip(), place) for part in match.groups())
        if forward.kind != "F" or backward.kind not in ("B", "I"):
            raise UserError(f"{place}: {text!r} does not pair a forward (F) with a backward (B or I), in this order")
        return Pair(forward, backward)
    return _action(text, place)


def _action(text: str, place: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise UserError(
            f"{place}: {text!r} is no action; write stage, kind (F, B, I or W) and microbatch, such as 3I0, "
            f"or a pair such as (0F4;7B1){PAIR}"
        )
    stage, kind, microbatch = match.groups()
    return Action(cast(Kind, kind), int(stage), int(microbatch))
