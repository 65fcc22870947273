"""The schedule `auto`: the best that is found for measured times and a limit of memory.

Ranks fill their time greedily (listing.py) with one set of habits after the other; the best few are polished, and the
schedules that are written by hand compete where they keep the limit. All is a function of the input: the same times
give the same schedule on every rank. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from fivefold.errors import UserError
from fivefold.pipeline.check import over_limit
from fivefold.pipeline.classic import gpipe, interleaved, naive, one_forward_one_backward
from fivefold.pipeline.listing import Habits, Problem, orders
from fivefold.pipeline.polish import Polished, polish
from fivefold.pipeline.schedule import Schedule, looped, v_shaped
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.timeline import Timeline
from fivefold.pipeline.times import Sizes, Times
from fivefold.pipeline.v_shaped import dualpipe_v, zb_v
from fivefold.pipeline.zero_bubble import zb_h1, zb_h2

HABITS = (
    Habits(await_first=0.5, await_next=0.5, await_last=0.5, in_turn=True),
    Habits(await_first=0.5, in_turn=True, shared=True),
    Habits(await_first=0.5, await_next=1.0, await_last=1.0, shared=True),
    Habits(await_first=0.5, in_turn=True),
    Habits(await_next=1.0, await_last=1.0, in_turn=True),
    Habits(await_first=0.5, await_last=0.5),
    Habits(await_first=1.0, await_last=0.5, in_turn=True),
    Habits(await_first=0.5, await_next=0.5, await_last=0.5),
    Habits(),
    Habits(in_turn=True),
    Habits(await_last=0.5, taper=0.75),
    Habits(taper=1.0),
    Habits(await_first=1.0, taper=0.75),
    Habits(await_next=0.5, await_last=1.0),
)
"""Those of 216 combinations that were best somewhere in some hundred cases of ranks, times and limits."""
POLISHED = 3
"""Of the listed ones, how many are simulated and polished."""
EFFORT = 10_000
"""Steps of polishing times actions of the schedule, which bounds the time; large ones gain the least by it."""


def auto_placement(ranks: int, chunks: int) -> tuple[int, ...]:
    """V-shaped for two chunks a rank, which needs the least memory; else around the ranks."""
    return v_shaped(ranks) if chunks == 2 else looped(ranks, chunks)


def auto(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    times: Times | None = None,
    memory: float | None = None,
    weight: float = 1.0,
) -> Schedule:
    """The schedule with the smallest bubble that is found, of equal ones the one that ends first, then the smallest.

    `times` are in any unit, one of each for every action if None. `memory` limits what a rank holds, in activations of
    one whole rank of one microbatch: an activation is one from F to I and `weight` of one from I to the end of W.
    Raises UserError if the limit is below that of one microbatch, or the times are of another number of stages.
    """
    placement = auto_placement(ranks, chunks)
    times = Times.uniform(len(placement), 1.0, 1.0, 1.0) if times is None else times
    if len(times.forward) != len(placement):
        raise UserError(
            f"schedule auto: the times are of {len(times.forward)} stages, and {ranks} ranks with {chunks} chunks "
            f"each have {len(placement)}; measure them with the same pp and chunks"
        )
    limit = inf if memory is None else memory
    if limit < max(1.0, weight):
        raise UserError(
            f"schedule auto: a limit of {limit:g} activations is too small; the smallest is {max(1.0, weight):g}, "
            "which one microbatch at a time needs"
        )
    sizes = Sizes.uniform(placement, weight)

    problem = Problem(placement, microbatches, times, limit, weight)
    listed = sorted({order: span for span, order in (orders(problem, habits) for habits in HABITS)}.items(), key=_span)
    steps = EFFORT // (3 * len(placement) * microbatches)
    found = [
        polish(Schedule("auto", order, placement, microbatches), times, sizes, limit, steps)
        for order, _ in listed[:POLISHED]
    ]
    for schedule in _by_hand(ranks, microbatches, chunks):
        if not over_limit(schedule, sizes, limit):
            found.append(Polished(schedule, simulate(schedule, times, sizes)))
    best = min(found, key=lambda one: _standing(one.timeline))
    return replace(best.schedule, name="auto")


def _span(listed: tuple[object, float]) -> float:
    return listed[1]


def _standing(timeline: Timeline) -> tuple[float, float, float]:
    """What is compared: nine digits of it, so that sums rounded in another order are equal."""
    return (
        float(f"{timeline.cost:.9g}"),
        float(f"{timeline.makespan:.9g}"),
        float(f"{max(timeline.peak):.9g}"),
    )


def _by_hand(ranks: int, microbatches: int, chunks: int) -> Iterator[Schedule]:
    """The other schedules with the same placement."""
    if chunks == 1:
        for make in (naive, gpipe, one_forward_one_backward, zb_h1, zb_h2):
            yield make(ranks, microbatches)
    elif chunks == 2:
        yield zb_v(ranks, microbatches)
        if microbatches >= 2 * ranks:
            yield dualpipe_v(ranks, microbatches)
    else:
        yield interleaved(ranks, microbatches, chunks)
