"""The schedules by name: what each demands (config/schedules.py) joined with where its stages lie and how it is made.

Another package registers one of its own, an object of class `Named`, under the entry point `fivefold.schedules`.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fivefold import plugins
from fivefold.config import schedules as demands
from fivefold.config.schedules import Demands
from fivefold.errors import UserError
from fivefold.pipeline.classic import gpipe, interleaved, naive, one_forward_one_backward
from fivefold.pipeline.greedy import auto, auto_placement
from fivefold.pipeline.schedule import Schedule, looped, v_shaped
from fivefold.pipeline.times import Times
from fivefold.pipeline.v_shaped import dualpipe_v, zb_v
from fivefold.pipeline.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True)
class Wanted:
    """What a schedule is made for."""

    ranks: int
    microbatches: int
    chunks: int = 1
    """Stages a rank."""
    times: Times | None = None
    """What the actions take; None for one unit each. Only `auto` asks."""
    memory: float | None = None
    """The activations of one whole rank that a rank may hold; None for any number. Only `auto` asks."""
    weight: float = 1.0
    """What of an activation is held from I to the end of W, as a share. Only `auto` asks."""


@dataclass(frozen=True, kw_only=True)
class Named(Demands):
    """A schedule that can be named."""

    make: Callable[[Wanted], Schedule]
    """The schedule, for anything wanted that meets the demands."""
    placement: Callable[[int, int], tuple[int, ...]] = looped
    """From ranks and chunks to the rank of each stage."""


def _v(ranks: int, chunks: int) -> tuple[int, ...]:
    return v_shaped(ranks)


def _named(
    name: str, make: Callable[[Wanted], Schedule], placement: Callable[[int, int], tuple[int, ...]] = looped
) -> Named:
    return Named(**vars(demands.SCHEDULES[name]), make=make, placement=placement)


SCHEDULES: Mapping[str, Named] = {
    "naive": _named("naive", lambda w: naive(w.ranks, w.microbatches)),
    "gpipe": _named("gpipe", lambda w: gpipe(w.ranks, w.microbatches)),
    "1f1b": _named("1f1b", lambda w: one_forward_one_backward(w.ranks, w.microbatches)),
    "interleaved": _named("interleaved", lambda w: interleaved(w.ranks, w.microbatches, w.chunks)),
    "zb-h1": _named("zb-h1", lambda w: zb_h1(w.ranks, w.microbatches)),
    "zb-h2": _named("zb-h2", lambda w: zb_h2(w.ranks, w.microbatches)),
    "zb-v": _named("zb-v", lambda w: zb_v(w.ranks, w.microbatches), placement=_v),
    "dualpipe-v": _named("dualpipe-v", lambda w: dualpipe_v(w.ranks, w.microbatches), placement=_v),
    "auto": _named(
        "auto",
        lambda w: auto(w.ranks, w.microbatches, w.chunks, w.times, w.memory, w.weight),
        placement=auto_placement,
    ),
}
"""Those that ship with Fivefold, plainest first."""


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    times: Times | None = None,
    memory: float | None = None,
    weight: float = 1.0,
) -> Schedule:
    """The schedule called `name` for `ranks` pipeline ranks with `chunks` stages each.

    `times`, `memory` (activations of one whole rank, of one microbatch) and `weight` (the share of one that is held
    from I to the end of W) are what `auto` searches with; the other schedules do not depend on them.
    Raises UserError if there is no such schedule, or if there is none for these numbers, or if one that another package
    registered makes something else. Whether its actions are sound is not asked here.
    """
    named = plugins.find("schedules", name, SCHEDULES)
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if number < 1:
            raise UserError(f"schedule {name} with {number} {what}: at least 1 is needed")
    if named.chunks is not None and chunks != named.chunks:
        unit = "chunk" if named.chunks == 1 else "chunks"
        raise UserError(f"schedule {name} has {named.chunks} {unit} a rank, not {chunks}")
    if microbatches < named.fewest(ranks):
        raise UserError(
            f"schedule {name} on {ranks} ranks takes at least {named.fewest(ranks)} microbatches a step, "
            f"not {microbatches}; have more of them, or take another schedule"
        )
    made = named.make(Wanted(ranks, microbatches, chunks, times, memory, weight))
    if not isinstance(made, Schedule):
        raise UserError(f"schedule {name}: what makes it returned a {type(made).__name__}, and no Schedule")
    if made.placement != (placement := tuple(named.placement(ranks, chunks))):
        raise UserError(
            f"schedule {name}: its stages are made for the ranks {made.placement}, but its placement says {placement}"
        )
    return replace(made, name=name)


def placement_of(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage under the schedule called `name`.

    Raises UserError if there is no such schedule.
    """
    return plugins.find("schedules", name, SCHEDULES).placement(ranks, chunks)
