"""What the actions of one step of a run took on each rank, as it lies in the run's folder.

The executor's record: a run writes it, and it is drawn beside the simulated timeline or fed back as the times of a new
schedule. Imports no torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from fivefold.durable import replace_file
from fivefold.errors import UserError
from fivefold.pipeline.check import require_sound
from fivefold.pipeline.schedule import Action, Kind, Schedule
from fivefold.pipeline.text import from_csv
from fivefold.pipeline.timeline import Span, Timeline
from fivefold.pipeline.times import LONGEST, SHORTEST, Sizes, Times

PIPELINE_FILE = "pipeline.json"
"""Its name in the run's folder."""


@dataclass(frozen=True)
class Measured:
    """One optimizer step of a pipeline, as it went."""

    schedule_csv: str
    """The schedule that ran, as torch's CSV."""
    schedule_name: str
    step: int
    """Number of the optimizer step."""
    spans: Sequence[Sequence[tuple[str, float, float]]]
    """By rank and in the schedule's order: an action's text, its start and its end in seconds, on one clock."""
    transfer_s: float
    """Seconds that one activation takes from a rank to its neighbour, measured while nothing else ran."""
    tokens: int
    """Of a microbatch; of the longest one, where they differ."""

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule that ran. Raises UserError if its text is none."""
        return from_csv(self.schedule_csv, self.schedule_name)

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all. Raises OSError if it cannot be written."""
        replace_file(path, json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Measured:
        """What `save` wrote. Raises UserError if it cannot be read, is damaged, or does not fit its own schedule."""
        try:
            measured = _read(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, RecursionError, UserError) as error:  # bad JSON and bad UTF-8 are ValueErrors too
            raise UserError(f"{path} is damaged ({error}); the next measured step of its run replaces it") from error
        return measured

    def times(self) -> Times:
        """The median of each stage's F, I and W, and the transfer as what the bytes take on a link.

        A full backward counts as an I and a W. It is split in the ratio of the stage's own medians of I and W, where it
        ran both; else in that of all stages' I and W; else in halves, as their matrix products are of one size.
        """
        took = self._durations()
        stages = range(self.schedule.stages)
        split = [stage for stage in stages if took["I", stage] and took["W", stage]]
        everywhere = _input_share(took, split) if split else 0.5
        forward, input_, weight = [], [], []
        for stage in stages:
            share = _input_share(took, [stage]) if stage in split else everywhere
            full = took["B", stage]
            forward.append(median(took["F", stage]))
            input_.append(median([*took["I", stage], *(seconds * share for seconds in full)]))
            weight.append(median([*took["W", stage], *(seconds * (1 - share) for seconds in full)]))
        return Times(tuple(forward), tuple(input_), tuple(weight), transfer=self.transfer_s)

    def timeline(self) -> Timeline:
        """What ran when, from the first start of all ranks on; transfers are not among what is measured."""
        first = min(start for spans in self.spans for _, start, _ in spans)
        ranks = (
            tuple(
                Span(action, start - first, end - first) for action, (_, start, end) in zip(actions, spans, strict=True)
            )
            for actions, spans in zip(self.schedule.actions, self.spans, strict=True)
        )
        return Timeline(tuple(ranks), (), Sizes.uniform(self.schedule.placement))

    @property
    def bubble(self) -> float:
        """The share of the longest rank's time in which it ran no action, as `Timeline.bubble`."""
        return self.timeline().bubble

    def _durations(self) -> dict[tuple[Kind, int], list[float]]:
        """Seconds of each kind and stage."""
        took: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for actions, spans in zip(self.schedule.actions, self.spans, strict=True):
            for action, (_, start, end) in zip(actions, spans, strict=True):
                took[action.kind, action.stage].append(end - start)
        return took


def _input_share(took: dict[tuple[Kind, int], list[float]], stages: Sequence[int]) -> float:
    """Which share of I and W is I's, on stages that ran both."""
    input_, weight = (sum(median(took[kind, stage]) for stage in stages) for kind in ("I", "W"))
    return input_ / (input_ + weight) if input_ + weight else 0.5


def _read(values: Any) -> Measured:
    """The record that JSON values hold. Raises ValueError with what is wrong."""
    names = [field.name for field in fields(Measured)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ValueError(f"it should hold {', '.join(names)}")
    measured = Measured(**values)
    for name, kinds in (("schedule_csv", str), ("schedule_name", str), ("step", int), ("tokens", int)):
        if type(values[name]) is not kinds:
            raise ValueError(f"{name} is {values[name]!r}")
    if not _is_time(measured.transfer_s) or measured.transfer_s < 0:
        raise ValueError(f"transfer_s is {measured.transfer_s!r}")
    require_sound(measured.schedule)
    ranks = measured.schedule.actions
    if not isinstance(measured.spans, list) or len(measured.spans) != len(ranks):
        raise ValueError(f"spans should be {len(ranks)} lists, one a rank of its schedule")
    spans = [_spans(rank, actions, measured.spans[rank]) for rank, actions in enumerate(ranks)]
    if sum(end - start for each in spans for _, start, end in each) < SHORTEST:
        raise ValueError("none of its actions took any time")
    return replace(measured, spans=spans)


def _spans(rank: int, actions: Sequence[Action], spans: Any) -> list[tuple[str, float, float]]:
    """One rank's spans. Raises ValueError if they are not those of its actions."""
    if not isinstance(spans, list) or len(spans) != len(actions):
        raise ValueError(f"rank {rank} has {len(actions)} actions, and spans should be a list of as many")
    for action, span in zip(actions, spans, strict=True):
        if not isinstance(span, list) or len(span) != 3 or span[0] != str(action):
            raise ValueError(f"rank {rank}: {span!r} stands where {action} with its start and end should")
        start, end = span[1:]
        if not _is_time(start) or not _is_time(end) or start > end:
            raise ValueError(f"rank {rank}: {action} starts at {start!r} and ends at {end!r}")
    return [tuple(span) for span in spans]


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and -LONGEST <= value <= LONGEST  # type: ignore[operator]
