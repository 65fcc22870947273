"""What a schedule is to be simulated with: one rank's times of a microbatch as numbers, or those that a run measured.

Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from fivefold.errors import UserError
from fivefold.pages import say
from fivefold.pipeline.measured import PIPELINE_FILE, Measured
from fivefold.pipeline.times import LONGEST, SHORTEST, Times
from fivefold.plan.run_folder import RUNS, run_folder


@dataclass(frozen=True)
class RankTimes:
    """The same for every rank: of all its stages together, and one microbatch."""

    forward: float
    input: float
    weight: float
    hop: float
    """Of a transfer between two ranks."""
    unit = ""

    def of(self, placement: Sequence[int]) -> Times:
        """The times of each stage: a rank's are shared evenly by its stages."""
        stages = Counter(placement)
        forward, input_, weight = (
            tuple(time / stages[rank] for rank in placement) for time in (self.forward, self.input, self.weight)
        )
        return Times(forward, input_, weight, latency=self.hop)

    def says(self, stages: int) -> str:
        """Where the times come from, in a sentence's part."""
        values = [
            f"{name} {say(time)}" for name, time in zip("FIW", (self.forward, self.input, self.weight), strict=True)
        ]
        return f"a rank's {', '.join(values)} a microbatch, {say(self.hop)} a hop"


@dataclass(frozen=True)
class RunTimes:
    """What a run measured."""

    folder: Path
    measured: Measured
    unit = "s"

    def of(self, placement: Sequence[int]) -> Times:
        """The times of each stage; those of another number of stages are spread evenly over the model."""
        times = self.measured.times()
        forward, input_, weight = (_spread(each, len(placement)) for each in (times.forward, times.input, times.weight))
        return replace(times, forward=forward, input=input_, weight=weight)

    def says(self, stages: int) -> str:
        """Where the times come from, in a sentence's part."""
        had = self.measured.schedule.stages
        spread = f", of {had} stages, spread evenly over {stages}" if had != stages else ""
        return f"times measured in step {self.measured.step} of {self.folder}{spread}"


def read_times(text: str) -> RankTimes | RunTimes:
    """What `F,I,W,C` or a run (its folder, or its name in `runs`) says. Raises UserError if it is neither."""
    if folder := run_folder(text):
        return _of_run(folder)
    parts = text.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if not numbers or (len(parts) == 1 and text):
        raise UserError(
            f"--times {text} is no run ({text} and {RUNS / text} are no folders) and no times: give four numbers "
            "F,I,W,C, such as 1,1,1,0, or the folder of a run"
        )
    if len(numbers) != 4:
        raise UserError(
            f"--times {text} has {len(numbers)} numbers, and four are needed: a rank's F, I and W of a microbatch, and "
            "C of a transfer, such as 1,1,1,0"
        )
    if not all(0 <= number <= LONGEST for number in numbers) or sum(numbers[:3]) < SHORTEST:
        raise UserError(
            f"--times {text}: times are not negative and at most {LONGEST:g}, and F, I and W are not all 0, or all "
            f"below {SHORTEST:g}"
        )
    return RankTimes(*numbers)


def _of_run(folder: Path) -> RunTimes:
    file = folder / PIPELINE_FILE
    if not file.exists():
        raise UserError(
            f"{folder} has no {PIPELINE_FILE}: no step of a pipeline was measured in it; name a run with parallel.pp "
            "above 1, or give four numbers F,I,W,C"
        )
    return RunTimes(folder, Measured.load(file))


def _spread(times: Sequence[float], stages: int) -> tuple[float, ...]:
    """The times of `stages` equal parts of what `times` has in as many equal parts as it has entries."""
    had = len(times)
    if had == stages:
        return tuple(times)
    edges = [had * stage / stages for stage in range(stages + 1)]
    return tuple(
        sum(time * max(0.0, min(part + 1, end) - max(part, start)) for part, time in enumerate(times))
        for start, end in pairwise(edges)
    )
