"""What lies in a run's folder of its past: the run file, the lines of steps, the loads of experts, the events.

Whatever is torn or no number in a file is left out: a report of a run that was killed is asked for most. Imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.config.files import load_run
from fivefold.config.run import Model, Run
from fivefold.errors import UserError
from fivefold.model.spec import moe_layers
from fivefold.observe.events import read_events
from fivefold.observe.lines import read_lines
from fivefold.observe.metrics import read_metrics
from fivefold.observe.observer import EVENTS, EXPERTS, METRICS

RUN_FILE = "run.yaml"
Points = list[tuple[int, float]]
"""Steps and values, in the order of steps."""


@dataclass(frozen=True)
class Choices:
    """How often each expert was chosen in a step."""

    step: int
    by_layer: Mapping[int, Sequence[int]]

    def loads(self, layer: int) -> list[float]:
        """Each expert's choices over the mean of all: 1 is even."""
        counts = self.by_layer[layer]
        mean = sum(counts) / len(counts)
        return [count / mean if mean else 0.0 for count in counts]

    def worst_load(self, layer: int) -> float:
        """The largest load of the layer."""
        return max(self.loads(layer))


@dataclass(frozen=True)
class History:
    """A run, at least one step of which is done."""

    folder: Path
    run: Run
    lines: Sequence[Mapping[str, Any]]
    """Of metrics.jsonl."""
    events: Sequence[Mapping[str, Any]]
    choices: Sequence[Choices]
    """Of all layers with experts, in the model's order; empty without experts."""

    def points(self, key: str) -> Points:
        """The steps that have a number under `key`, which may be no finite one."""
        return [(line["step"], float(line[key])) for line in self.lines if _is_number(line.get(key))]

    def keys(self, prefix: str) -> list[str]:
        """Those of any line that begin with `prefix`, in their first order."""
        return [key for key in dict.fromkeys(key for line in self.lines for key in line) if key.startswith(prefix)]

    @property
    def last(self) -> Mapping[str, Any]:
        """The line of the newest step that was trained."""
        return next(line for line in reversed(self.lines) if _is_number(line.get("loss")))

    def name_of(self, layer: int) -> str:
        """What a person calls the layer of that number."""
        depth = layer - self.run.model.layers
        return f"layer {layer}" if depth < 0 else f"mtp {depth + 1}"


def read_history(folder: Path) -> History:
    """What the folder holds. Raises UserError if it holds no run, or one that has not done a step."""
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"{folder} holds no {RUN_FILE}: name the folder of a run, such as runs/tiny")
    run = load_run(folder / RUN_FILE, rules=())
    try:
        lines = [line for line in read_metrics(folder / METRICS) if _is_whole(line.get("step"))]
        events = read_events(folder / EVENTS)
        choices = [*_choices(folder / EXPERTS, run.model)]
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror or error}") from error
    if not any(_is_number(line.get("loss")) for line in lines):
        raise UserError(f"{folder / METRICS} has no step yet: there is something to report once the first one is done")
    return History(folder, run, sorted(lines, key=lambda line: line["step"]), events, choices)


def _choices(path: Path, model: Model) -> Iterator[Choices]:
    """The lines that tell of all the model's layers with experts, and of all experts in each."""
    if model.moe is None:
        return
    names = [str(layer) for layer in moe_layers(model)]
    for line in read_lines(path):
        counts = line.get("counts")
        if not _is_whole(line.get("step")) or not isinstance(counts, dict) or list(counts) != names:
            continue
        if all(_is_row(row, model.moe.experts) for row in counts.values()):
            yield Choices(line["step"], {int(name): row for name, row in counts.items()})


def _is_row(row: object, experts: int) -> bool:
    return isinstance(row, list) and len(row) == experts and all(map(_is_whole, row))


def _is_whole(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def finite(points: Points) -> Points:
    """Those that can be drawn."""
    return [(step, value) for step, value in points if math.isfinite(value)]
