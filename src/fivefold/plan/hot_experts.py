"""How unevenly experts are loaded: a number that the user gives, or what a finished run counted.

The ranks of `parallel.ep` wait for the one that gets most rows, in each layer anew. So what matters is, layer by layer,
the load of the busiest rank over the mean. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean

from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.observe.lines import read_lines
from fivefold.observe.observer import EXPERTS
from fivefold.plan.schedule_times import RUNS

MEASURED_WITH_BIASES = 1.2
"""The largest load of an expert of the worst layer, with biases alone and 8,192 tokens a step (docs/experts.md)."""


def read_hot_experts(text: str, run: Run) -> float:
    """What a number, or a run (its folder, or its name in `runs`), says of a run with this model and `parallel.ep`.

    Of a run it is the mean over its layers and over the later half of the steps that it counted. Raises UserError if
    it is neither, or counted the choices of another number of experts.
    """
    for folder in (Path(text), RUNS / text):
        if text and folder.is_dir():
            return _counted(folder, run)
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


def rank_load(counts: Sequence[float], ep: int) -> float:
    """The choices of the busiest of `ep` ranks over their mean, where rank r has the r-th part of a layer's experts."""
    own = len(counts) // ep
    loads = [sum(counts[first : first + own]) for first in range(0, len(counts), own)]
    return max(loads) / fmean(loads)


def _counted(folder: Path, run: Run) -> float:
    file = folder / EXPERTS
    lines = list(read_lines(file)) if file.exists() else []
    layers = [counts for line in lines[len(lines) // 2 :] for counts in line["counts"].values() if sum(counts)]
    if not layers:
        raise UserError(f"{file} has no counts of experts' choices; name a run of a model with experts, or a number")
    moe, ep = run.model.moe, run.parallel.ep
    if moe is None or moe.experts != len(layers[0]):
        has = "none" if moe is None else f"{moe.experts}"
        raise UserError(f"{file} counts the choices of {len(layers[0])} experts, and the model has {has}")
    if ep == 1:
        raise UserError(
            f"with parallel.ep = 1 every rank has all experts, so {file} makes none of them hotter; give parallel.ep, "
            "for which the load of a rank is counted, or a number"
        )
    return fmean(rank_load(counts, ep) for counts in layers)
