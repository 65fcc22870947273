"""Whether a schedule can run and computes every gradient once, and what is wrong with it, action by action.

Sends never block and a receive is waited for just before the action that needs it, so ranks wait for each other forever
exactly if their orders and what the actions need make a circle. Places are counted from 0 in a rank's list, as torch's
CSV counts its columns. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import NamedTuple

from fivefold.errors import UserError
from fivefold.pipeline.flow import gives, needs
from fivefold.pipeline.memory import levels
from fivefold.pipeline.schedule import KINDS, Action, Schedule, actions_of
from fivefold.pipeline.times import Sizes

SHOWN = 4
"""Faults of one kind that are spelled out; of the others the number is told."""


def require_sound(schedule: Schedule) -> None:
    """Raises UserError with every fault of `schedule`, if it has any."""
    found = faults(schedule)
    if found:
        raise UserError(f"schedule {schedule.name} cannot run:\n" + "\n".join(f"  {fault}" for fault in found))


def faults(schedule: Schedule) -> list[str]:
    """What is wrong with `schedule`, each with the action in question; empty if it can run and computes all once.

    Circles between ranks are looked for only where every action is there once and each rank's own order is right.
    """
    misplaced = list(_misplaced_stages(schedule))
    if misplaced:
        return misplaced
    places = _places(schedule)
    found = [line for kind in (_unknown, _astray, _doubled, _missing) for line in _short(kind(schedule, places))]
    done = _run(schedule)
    if not found and all(count == len(actions) for count, actions in zip(done, schedule.actions, strict=True)):
        return []
    found += _short(_out_of_order(schedule, places))
    return found or [_circle(schedule, places, done)]


def over_limit(schedule: Schedule, sizes: Sizes, limit: float) -> list[str]:
    """The ranks that hold more than `limit` activations, and where each first does.

    Activations are those of one whole rank of one microbatch; a limit counts as kept up to a rounding of 1e-9.
    """
    places = _places(schedule)
    found = []
    for actions in schedule.actions:
        held = [level.during for level in levels(actions, sizes)]
        over = next((number for number, much in enumerate(held) if much > limit + 1e-9), None)
        if over is not None:
            where = f"{actions[over]} ({places.first[actions[over]]})"
            most = f"the limit is {limit:.6g}, the rank's most {max(held):.6g}"
            found.append(f"{where} runs with {held[over]:.6g} activations held: {most}")
    return found


class _Place(NamedTuple):
    """Where an action stands; the two of a pair stand in one place."""

    rank: int
    step: int

    def __str__(self) -> str:
        return f"rank {self.rank}, place {self.step}"


@dataclass
class _Places:
    """Where the actions of a schedule stand."""

    first: dict[Action, _Place] = field(default_factory=dict)
    again: list[tuple[Action, _Place]] = field(default_factory=list)
    """Those that stand somewhere already."""


def _places(schedule: Schedule) -> _Places:
    places = _Places()
    for rank, steps in enumerate(schedule.ranks):
        for number, step in enumerate(steps):
            place = _Place(rank, number)
            for action in actions_of(step):
                if places.first.setdefault(action, place) is not place:
                    places.again.append((action, place))
    return places


def _short(faults: Iterable[str]) -> list[str]:
    """The first few of one kind, and how many more there are."""
    lines = list(faults)
    more = len(lines) - SHOWN
    return lines if more <= 1 else [*lines[:SHOWN], f"and {more} more such faults"]


def _misplaced_stages(schedule: Schedule) -> Iterator[str]:
    ranks = len(schedule.ranks)
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < ranks:
            yield f"stage {stage} is on no rank: its placement says {rank}, and there are ranks 0 to {ranks - 1}"
    for rank in sorted(set(range(ranks)) - set(schedule.placement)):
        yield f"rank {rank} has no stage; there are {schedule.stages} stages for {ranks} ranks"
    if schedule.microbatches < 1:
        yield f"there are {schedule.microbatches} microbatches; a step has at least 1"


def _is_known(schedule: Schedule, action: Action) -> bool:
    kind, stage, microbatch = action
    return 0 <= stage < schedule.stages and 0 <= microbatch < schedule.microbatches and kind in KINDS


def _unknown(schedule: Schedule, places: _Places) -> Iterator[str]:
    for action, place in places.first.items():
        if not _is_known(schedule, action):
            yield (
                f"{action} ({place}) does not exist: there are stages 0 to {schedule.stages - 1}, "
                f"microbatches 0 to {schedule.microbatches - 1} and the kinds {', '.join(KINDS)}"
            )


def _astray(schedule: Schedule, places: _Places) -> Iterator[str]:
    for action, place in (*places.first.items(), *places.again):
        if _is_known(schedule, action) and place.rank != schedule.placement[action.stage]:
            home = schedule.placement[action.stage]
            yield f"{action} ({place}) is on the wrong rank: stage {action.stage} is on rank {home}"


def _doubled(schedule: Schedule, places: _Places) -> Iterator[str]:
    for action, place in places.again:
        yield f"{action} ({place}) is doubled: it is also at {places.first[action]}"


def _missing(schedule: Schedule, places: _Places) -> Iterator[str]:
    """Forwards and backwards that are not there, and backwards that are there both whole and in halves."""
    first = places.first
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            f, b, i, w = (Action(kind, stage, microbatch) for kind in KINDS)
            if f not in first:
                yield f"{f} is missing: rank {rank} never runs forward of microbatch {microbatch} in stage {stage}"
            if b in first:
                for half in (i, w):
                    if half in first:
                        yield f"{half} ({first[half]}) is doubled: {b} ({first[b]}) computes the same"
            elif i not in first and w not in first:
                yield f"{b} is missing, or {i} and {w}: rank {rank} never runs backward of it"
            elif w not in first:
                yield f"{w} is missing: {i} ({first[i]}) leaves the weight gradient to it"
            elif i not in first:
                yield f"{i} is missing: {w} ({first[w]}) computes the weight gradient only"


def _out_of_order(schedule: Schedule, places: _Places) -> Iterator[str]:
    """Actions that stand before one of the same rank that they need."""
    for action, place in places.first.items():
        if _is_known(schedule, action):
            for needed in _followed(action, schedule.stages):
                other = places.first.get(needed, place)
                if other.rank == place.rank and other.step > place.step:
                    yield f"{action} ({place}) comes before {needed} ({other}), which it needs"


def _followed(action: Action, stages: int) -> set[Action]:
    """What `action` has to follow, under every name that it can have."""
    output = needs(action, stages)
    names = set() if output is None else _makers(output)
    return names if action.kind == "F" else names | {action._replace(kind="F")}


def _makers(output: Action) -> set[Action]:
    """The actions of which one makes an output."""
    return {output, output._replace(kind="I")} if output.kind == "B" else {output}


def _run(schedule: Schedule) -> list[int]:
    """How many of its actions each rank runs until it waits forever, or all of them.

    Whoever gets through has I and B after their own F and W after its I too: no gradient reaches them earlier.
    """
    stages = schedule.stages
    done = [0] * len(schedule.ranks)
    made: set[Action] = set()
    waiting: dict[Action, int] = {}
    ready = list(range(len(done)))
    while ready:
        rank = ready.pop()
        for action in islice(schedule.actions[rank], done[rank], None):
            needed = needs(action, stages)
            if needed is not None and needed not in made:
                waiting[needed] = rank
                break
            output = gives(action)
            made.add(output)
            done[rank] += 1
            if output in waiting:
                ready.append(waiting.pop(output))
    return done


def _circle(schedule: Schedule, places: _Places, done: list[int]) -> str:
    """The circle in which ranks wait for each other, given how many actions each has run."""
    first = places.first
    ways = enumerate(zip(schedule.actions, done, strict=True))
    heads = {rank: actions[at] for rank, (actions, at) in ways if at < len(actions)}

    def maker(waiting: Action) -> Action:
        output = needs(waiting, schedule.stages)
        assert output is not None, "an action that needs nothing never waits"
        return next(action for action in _makers(output) if action in first)

    path = [next(iter(heads.values()))]
    while path.count(path[-1]) == 1:
        path.append(heads[first[maker(path[-1])].rank])
    circle = path[path.index(path[-1]) :]
    links = []
    for waiting, head in pairwise(circle):
        made = maker(waiting)
        after = "" if made == head else f", which comes after {head}"
        links.append(f"waits for {made}{after} ({first[head]})")
    return f"{circle[0]} ({first[circle[0]]}) {', which '.join(links)}: a circle, in which none of them ever runs"
