"""How unevenly experts are loaded: a number that the user gives, or what a finished run counted.

The ranks of `parallel.ep` wait for the one that gets most rows, in each layer anew. So what matters is, layer by layer,
the load of the busiest rank over the mean. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.observe.lines import read_lines
from fivefold.observe.observer import EXPERTS
from fivefold.plan.run_folder import RUNS, run_folder

MEASURED_WITH_BIASES = 1.2
"""The largest load of an expert of the worst layer, with biases alone and 8,192 tokens a step (docs/experts.md)."""
MOST = 2**53
"""Choices that a count has at most: beyond it floats do not tell one number from the next."""


def read_hot_experts(text: str, run: Run) -> float:
    """What a number, or a run (its folder, or its name in `runs`), says of a run with this model and `parallel.ep`.

    Of a run it is the mean over its layers and over the later half of the steps that it counted. Raises UserError if
    it is neither, or counted the choices of another number of experts.
    """
    if folder := run_folder(text):
        return _given(folder, run)
    try:
        hot = float(text)
    except ValueError:
        hot = float("nan")
    if not isfinite(hot):
        raise UserError(
            f"--hot-experts {text} is no run ({text} and {RUNS / text} are no folders) and no number: give the rows of "
            f"the busiest rank of ep over the mean, such as {MEASURED_WITH_BIASES}, or the folder of a run"
        )
    return hot


def rank_load(counts: Sequence[float], ep: int, capacity: float | None = None) -> float:
    """The choices of the busiest of `ep` ranks over their mean, where rank r has the r-th part of a layer's experts.

    With a capacity an expert takes at most so many times its mean, and what it drops does not travel; at least 1.
    """
    own, mean = len(counts) // ep, fmean(counts)
    taken = [count if capacity is None else min(count, capacity * mean) for count in counts]
    busiest = max(sum(taken[first : first + own]) for first in range(0, len(taken), own))
    return max(1.0, busiest / (own * mean))


def load_counted(folder: Path, run: Run) -> float | None:
    """The load that the run in `folder` counted, for a run with this model and `parallel.ep`; None if it counted none.

    Raises UserError if its file cannot be read, or counts the choices of another number of experts.
    """
    file, moe, ep = folder / EXPERTS, run.model.moe, run.parallel.ep
    try:
        lines = [counts for line in read_lines(file) if (counts := _counts(line))]
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from error
    layers = [counts for line in lines[len(lines) // 2 :] for counts in line]
    if not layers:
        return None
    mine = [counts for counts in layers if moe is not None and len(counts) == moe.experts]
    if not mine:
        has = "none" if moe is None else f"{moe.experts}"
        raise UserError(f"{file} counts the choices of {len(layers[-1])} experts, and the model has {has}")
    if ep == 1:
        raise UserError(
            f"with parallel.ep = 1 every rank has all experts, so {file} makes none of them hotter; give parallel.ep, "
            "for which the load of a rank is counted, or a number"
        )
    if moe is not None and moe.experts % ep:
        raise UserError(f"{moe.experts} experts cannot be shared out over parallel.ep = {ep}, so no rank has a load")
    return fmean(rank_load(counts, ep, run.routing.capacity_factor) for counts in mine)


def _given(folder: Path, run: Run) -> float:
    found = load_counted(folder, run)
    if found is None:
        raise UserError(
            f"{folder / EXPERTS} has no counts of experts' choices; name a run of a model with experts, or a number"
        )
    return found


def _counts(line: Mapping[str, Any]) -> list[list[float]]:
    """The choices of each expert, by layer, on a line of experts.jsonl; of layers that nothing was counted of, none."""
    counts = line.get("counts")
    return [each for each in counts.values() if _is_counted(each)] if isinstance(counts, dict) else []


def _is_counted(counts: Any) -> bool:
    """Whether these are the choices of a layer's experts."""
    return isinstance(counts, list) and all(map(_is_count, counts)) and sum(counts) > 0


def _is_count(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= MOST
