"""What `fivefold schedule` answers: a schedule, made or read from a file, checked, simulated and drawn.

Imports neither torch nor the run file's classes, so that the answer is there at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from fivefold.config.schedules import demands_of, is_file
from fivefold.errors import UserError
from fivefold.outputs import write_file
from fivefold.pages import say
from fivefold.pipeline.check import require_sound
from fivefold.pipeline.draw import Panel, last_end
from fivefold.pipeline.draw_svg import svg
from fivefold.pipeline.draw_text import legend, painted, text_rows
from fivefold.pipeline.named import make_schedule, placement_of
from fivefold.pipeline.page import page
from fivefold.pipeline.schedule import Schedule
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.text import read_csv, to_csv
from fivefold.pipeline.timeline import Timeline
from fivefold.pipeline.times import Times
from fivefold.plan.schedule_times import RankTimes, RunTimes, read_times


@dataclass(frozen=True)
class Asked:
    """What the command line says; None for what it leaves out."""

    name: str
    """Of a schedule, or of a CSV file."""
    times: str
    """`F,I,W,C`, or a run."""
    pp: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    memory: float | None = None
    """Activations of one whole rank that a rank may hold."""


@dataclass(frozen=True)
class Answer:
    """A sound schedule and how it would run."""

    schedule: Schedule
    times: Times
    source: RankTimes | RunTimes
    timeline: Timeline
    memory: float | None

    @property
    def too_much(self) -> str | None:
        """A message if a rank holds more than it may."""
        peak = max(self.timeline.peak)
        if self.memory is None or peak <= self.memory + 1e-9:
            return None
        return (
            f"{self.schedule.name} does not fit: rank {self.timeline.peak.index(peak)} holds {say(peak)} activations, "
            f"more than --memory {say(self.memory)}; the schedule auto makes one that stays below a limit"
        )

    def panels(self) -> list[Panel]:
        """What is drawn: the simulated timeline, and below it the measured one if the times are a run's."""
        panels = [Panel(f"{self.schedule.name}, simulated", self.timeline, self.source.unit)]
        if isinstance(self.source, RunTimes):
            measured = self.source.measured
            title = f"{measured.schedule_name}, step {measured.step} of {self.source.folder}, measured"
            panels.append(Panel(title, measured.timeline(), self.source.unit))
        return panels

    def says(self) -> str:
        """What it is and what it was simulated with."""
        schedule = self.schedule
        return (
            f"{schedule.name}: {len(schedule.ranks)} ranks, {schedule.stages} stages, "
            f"{schedule.microbatches} microbatches; {self.source.says(schedule.stages)}"
        )

    def lines(self, width: int) -> list[str]:
        """All of it for a terminal of `width` columns, in colours."""
        panels = self.panels()
        lines = [self.says()]
        for panel in panels:
            lines += ["", *([panel.title] if len(panels) > 1 else [])]
            lines += [painted(row) for row in text_rows(panel, width, last_end(panels))]
            lines += [f"{name:<26}{value}" for name, value in panel.numbers()]
        if self.memory is not None and self.too_much is None:
            lines.append(f"{'within --memory':<26}{say(self.memory)}")
        return [*lines, "", legend(panels)]

    def json(self) -> str:
        """All of it as JSON, a line a key."""
        schedule, times = self.schedule, self.times
        values: dict[str, Any] = {
            "name": schedule.name,
            "pp": len(schedule.ranks),
            "chunks": max(len(schedule.stages_of(rank)) for rank in range(len(schedule.ranks))),
            "microbatches": schedule.microbatches,
            "stages": schedule.stages,
            "times": {
                "forward": times.forward,
                "input": times.input,
                "weight": times.weight,
                "latency": times.latency,
                "transfer": times.transfer,
                "unit": self.source.unit or None,
            },
            "memory": self.memory,
            "fits": self.too_much is None,
            **_numbers(self.timeline),
            "placement": schedule.placement,
            "actions": [[str(action) for action in actions] for actions in schedule.actions],
            "spans": _spans(self.timeline),
        }
        if isinstance(self.source, RunTimes):
            measured = self.source.measured
            values["measured"] = {
                "run": str(self.source.folder),
                "name": measured.schedule_name,
                "step": measured.step,
                **_numbers(measured.timeline()),
                "actions": [[text for text, _, _ in spans] for spans in measured.spans],
                "spans": _spans(measured.timeline()),
            }
        return "{\n" + ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in values.items()) + "\n}"

    def write_csv(self, path: Path) -> None:
        """Write the schedule as torch's CSV. Raises UserError if the file cannot be written."""
        write_file(path, to_csv(self.schedule))

    def write_drawing(self, path: Path) -> None:
        """Write the page, or the picture alone if the name ends in .svg. Raises UserError as `write_csv`."""
        panels = self.panels()
        write_file(path, svg(panels) if path.suffix == ".svg" else page(self.schedule.name, panels, [self.says()]))


def answer(asked: Asked) -> Answer:
    """The schedule that was asked for, and its timeline.

    Raises UserError with what is wrong: a name, number, file, time or limit with which there is no schedule.
    """
    if asked.memory is not None and not 0 < asked.memory < inf:
        raise UserError(
            f"--memory {asked.memory}: a rank holds at least a part of an activation; give a positive number"
        )
    source = read_times(asked.times)
    if is_file(asked.name):
        schedule = _read(asked)
        times = source.of(schedule.placement)
    else:
        demands = demands_of(asked.name)
        if asked.pp is None or asked.microbatches is None:
            raise UserError(f"schedule {asked.name}: give --pp and --microbatches; only a CSV file says them itself")
        chunks = asked.chunks if asked.chunks is not None else demands.chunks or 1
        times = source.of(placement_of(asked.name, asked.pp, chunks))
        schedule = make_schedule(asked.name, asked.pp, asked.microbatches, chunks, times, asked.memory)
    require_sound(schedule)
    return Answer(schedule, times, source, simulate(schedule, times), asked.memory)


def _read(asked: Asked) -> Schedule:
    """The schedule of a file. Raises UserError if it is not what the flags beside it say."""
    path = Path(asked.name)
    try:
        schedule = read_csv(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    require_sound(schedule)
    ranks = len(schedule.ranks)
    chunks = sorted({len(schedule.stages_of(rank)) for rank in range(ranks)})
    for flag, wanted, found in (
        ("--pp", asked.pp, [ranks]),
        ("--microbatches", asked.microbatches, [schedule.microbatches]),
        ("--chunks", asked.chunks, chunks),
    ):
        if wanted is not None and [wanted] != found:
            raise UserError(
                f"{flag} {wanted} contradicts {path}, which has {' to '.join(map(str, found))}; leave {flag} out"
            )
    return schedule


def _numbers(timeline: Timeline) -> dict[str, Any]:
    return {
        "makespan": timeline.makespan,
        "cost": timeline.cost,
        "bubble": timeline.bubble,
        "peak_activations": timeline.peak,
    }


def _spans(timeline: Timeline) -> list[list[tuple[float, float]]]:
    """Start and end of each action, by rank."""
    return [[(span.start, span.end) for span in spans] for spans in timeline.spans]
