"""What holds for every schedule, however many ranks, microbatches and chunks, and whatever the actions take.

The oracles are naive on purpose: soundness is tried out by running whatever can run, times are relaxed until nothing
changes, and memory is counted from the definition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fivefold.pipeline.arrivals import Message, channels, receives
from fivefold.pipeline.check import faults, over_limit
from fivefold.pipeline.named import SCHEDULES, make_schedule
from fivefold.pipeline.schedule import Action, Schedule, Step, actions_of
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.timeline import Timeline
from fivefold.pipeline.times import Sizes, Times

EXAMPLES = settings(max_examples=150, deadline=None)
SECONDS = st.floats(0.1, 10)
WAIT = st.sampled_from([0.0, 0.3, 2.5])


@st.composite
def some_times(draw: st.DrawFn, stages: int) -> Times:
    kinds = (tuple(draw(st.lists(SECONDS, min_size=stages, max_size=stages))) for _ in range(3))
    return Times(*kinds, latency=draw(WAIT), transfer=draw(WAIT), overlap=draw(st.booleans()))


@st.composite
def timed_schedules(draw: st.DrawFn) -> tuple[Schedule, Times]:
    """Any of the named schedules, for any numbers that it is made for."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    named = SCHEDULES[name]
    ranks = draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3)) if named.chunks is None else named.chunks
    microbatches = draw(st.integers(named.fewest(ranks), max(12, named.fewest(ranks))))
    times = draw(some_times(ranks * chunks))
    return make_schedule(name, ranks, microbatches, chunks, times), times


@st.composite
def sizes_of(draw: st.DrawFn, stages: int) -> Sizes:
    much = st.floats(0, 2)
    return Sizes(*(tuple(draw(st.lists(much, min_size=stages, max_size=stages))) for _ in range(3)))


def prerequisites(action: Action, stages: int) -> list[set[Action]]:
    """Of each set, one action has to be done before `action`."""
    kind, stage, microbatch = action

    def backward(of: int) -> set[Action]:
        return {Action("B", of, microbatch), Action("I", of, microbatch)}

    if kind == "F":
        return [{Action("F", stage - 1, microbatch)}] if stage else []
    if kind == "W":
        return [{Action("I", stage, microbatch)}]
    return [{Action("F", stage, microbatch)}, *([backward(stage + 1)] if stage + 1 < stages else [])]


def is_sound(schedule: Schedule) -> bool:
    """Whether all that should be there is there once and in its place, and can be run to the end."""
    count = Counter(schedule.all_actions())
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.microbatches):
            f, b, i, w = (count.pop((rank, Action(kind, stage, microbatch)), 0) for kind in "FBIW")
            if f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                return False
    if count:
        return False
    queues = [list(actions) for actions in schedule.actions]
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and all(done & options for options in prerequisites(queue[0], schedule.stages)):
                done.add(queue.pop(0))
                moved = True
    return not any(queues)


def relaxed(schedule: Schedule, times: Times) -> dict[Action, tuple[float, float]]:
    """Start and end of every action: the earliest that all waiting allows, raised until nothing changes."""
    rank_of = schedule.placement
    travel = times.latency + times.transfer
    makers = {action: rank for rank, action in schedule.all_actions()}
    span = dict.fromkeys(makers, (0.0, 0.0))
    leaves: dict[Action, float] = {}
    while True:
        before = (dict(span), dict(leaves))
        for actions in schedule.actions:
            free = 0.0
            carried = dict.fromkeys(range(len(schedule.ranks)), 0.0)
            for action in actions:
                start = free
                for options in prerequisites(action, schedule.stages):
                    (maker,) = options & makers.keys()
                    if makers[maker] == makers[action]:
                        start = max(start, span[maker][1])
                    else:
                        own = free if times.overlap else free + travel
                        start = max(start, own, leaves.get(maker, 0.0) + travel)
                end = free = start + times.of(action)
                span[action] = (start, end)
                to = None if action.kind == "W" else action.stage + (1 if action.kind == "F" else -1)
                if to is not None and 0 <= to < schedule.stages and rank_of[to] != makers[action]:
                    leaves[action] = max(end, carried[rank_of[to]])
                    carried[rank_of[to]] = leaves[action] + times.transfer
                    if not times.overlap:
                        free = leaves[action] + travel
        if before == (span, leaves):
            return span


def critical_path(schedule: Schedule, times: Times) -> float:
    """What the longest chain of actions that need each other takes, if every rank could do all at once."""
    chain = sum(times.forward) + sum(times.input) + times.weight[0]
    hops = sum(2 for one, other in pairwise(schedule.placement) if one != other)
    return chain + hops * (times.latency + times.transfer)


@EXAMPLES
@given(timed_schedules())
def test_every_generated_schedule_is_sound(timed: tuple[Schedule, Times]) -> None:
    schedule, _ = timed
    assert faults(schedule) == []
    assert is_sound(schedule)


@EXAMPLES
@given(timed_schedules())
def test_the_simulated_order_is_the_schedules_and_every_action_runs_as_early_as_waiting_allows(
    timed: tuple[Schedule, Times],
) -> None:
    schedule, times = timed
    timeline = simulate(schedule, times)
    assert tuple(tuple(span.action for span in spans) for spans in timeline.spans) == schedule.actions
    oracle = relaxed(schedule, times)
    for spans in timeline.spans:
        for action, start, end in spans:
            assert (start, end) == pytest.approx(oracle[action], rel=1e-9)


@EXAMPLES
@given(timed_schedules())
def test_the_makespan_is_at_least_the_longest_chain_and_the_busiest_rank(timed: tuple[Schedule, Times]) -> None:
    schedule, times = timed
    timeline = simulate(schedule, times)
    rounding = 1 - 1e-9
    assert timeline.makespan >= critical_path(schedule, times) * rounding
    work = [sum(times.of(action) for action in actions) for actions in schedule.actions]
    assert timeline.busy == pytest.approx(work)
    assert timeline.makespan >= timeline.cost >= max(work) * rounding
    assert 0 <= timeline.bubble < 1


@EXAMPLES
@given(timed_schedules())
def test_messages_of_a_channel_follow_each_other_in_the_senders_order(timed: tuple[Schedule, Times]) -> None:
    schedule, times = timed
    timeline = simulate(schedule, times)
    ends = {action: end for spans in timeline.spans for action, _, end in spans}
    starts = {action: start for spans in timeline.spans for action, start, _ in spans}
    needed_by = consumers(schedule)
    for (source, target), carried in channels(schedule).items():
        travelled = [t for t in timeline.transfers if (t.source, t.target) == (source, target)]
        assert [t.action for t in travelled] == carried
        for earlier, later in pairwise(travelled):
            assert later.start >= earlier.start + times.transfer
        for t in travelled:
            assert t.start >= ends[t.action]
            assert starts[needed_by[t.action]] >= t.end
    assert len(timeline.transfers) == sum(map(len, channels(schedule).values()))


def consumers(schedule: Schedule) -> dict[Action, Action]:
    """By action, whoever on another rank needs what it makes."""
    return {
        maker: action
        for rank, action in schedule.all_actions()
        for options in prerequisites(action, schedule.stages)
        for maker in options
        if schedule.placement[maker.stage] != rank
    }


@EXAMPLES
@given(st.data())
def test_a_rank_never_holds_less_than_nothing_and_ends_with_nothing(data: st.DataObject) -> None:
    schedule, times = data.draw(timed_schedules())
    sizes = data.draw(sizes_of(schedule.stages))
    timeline = simulate(schedule, times, sizes)
    for rank in range(len(schedule.ranks)):
        curve = timeline.held(rank)
        assert all(much >= 0 for _, much in curve)
        assert curve[-1][1] == 0
        assert all(one[0] < other[0] and one[1] != other[1] for one, other in pairwise(curve))
        most = max(counted(timeline, rank, sizes))
        assert timeline.peak[rank] == pytest.approx(most, abs=1e-12)
        assert max(much for _, much in curve) == timeline.peak[rank]
    limit = data.draw(st.floats(0, 12))
    assert len(over_limit(schedule, sizes, limit)) == sum(peak > limit + 1e-9 for peak in timeline.peak)


def counted(timeline: Timeline, rank: int, sizes: Sizes) -> Iterator[float]:
    """What `rank` holds while each of its actions runs, from the definition: who has begun, and who has not ended."""
    order = [span.action for span in timeline.spans[rank]]
    at = {action: number for number, action in enumerate(order)}
    lives = []
    for (kind, *unit), number in at.items():
        (backward,) = at.keys() & {Action("B", *unit), Action("I", *unit)}
        if kind == "F":
            lives.append((number, at[backward], sizes.forward[unit[0]]))
        elif kind == "I":
            lives.append((number + 1, at[Action("W", *unit)], sizes.weight[unit[0]]))
        if kind in "BI":
            lives.append((number, number, sizes.transient[unit[0]]))
    for now in range(len(order)):
        yield sum(much for first, last, much in lives if first <= now <= last)


def mutated(data: st.DataObject, schedule: Schedule) -> Schedule:
    """`schedule` with one step dropped, doubled, moved, swapped, taken for another, or split in two."""
    ranks: list[list[Step]] = [list(steps) for steps in schedule.ranks]
    rank = data.draw(st.integers(0, len(ranks) - 1))
    steps = ranks[rank]
    at = data.draw(st.integers(0, len(steps) - 1))
    other = data.draw(st.integers(0, len(steps) - 1))
    how = data.draw(st.sampled_from(["drop", "double", "move", "swap", "neighbour", "rename", "renumber"]))
    if how == "drop":
        del steps[at]
    elif how == "double":
        steps.insert(other, steps[at])
    elif how == "move":
        ranks[data.draw(st.integers(0, len(ranks) - 1))].insert(0, steps.pop(at))
    elif how == "swap":
        steps[at], steps[other] = steps[other], steps[at]
    elif how == "neighbour":
        assume(at + 1 < len(steps))
        steps[at], steps[at + 1] = steps[at + 1], steps[at]
    else:
        first, *rest = actions_of(steps[at])
        if how == "rename":
            first = first._replace(kind=data.draw(st.sampled_from("FBIW")))
        else:
            first = first._replace(microbatch=data.draw(st.integers(0, schedule.microbatches)))
        steps[at : at + 1] = [first, *rest]
    return replace(schedule, ranks=tuple(map(tuple, ranks)))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_the_checker_rejects_exactly_the_mutations_that_break_a_schedule(data: st.DataObject) -> None:
    schedule, times = data.draw(timed_schedules())
    mutant = mutated(data, schedule)
    if is_sound(mutant):
        assert faults(mutant) == []
        assert simulate(mutant, times).spans
    else:
        assert faults(mutant)


@EXAMPLES
@given(st.data())
def test_a_dropped_or_doubled_action_is_named(data: st.DataObject) -> None:
    schedule, _ = data.draw(timed_schedules())
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    actions = list(schedule.actions[rank])
    action = data.draw(st.sampled_from(actions))
    plain = replace(schedule, ranks=schedule.actions)

    def having(changed: list[Action]) -> Schedule:
        return replace(plain, ranks=(*plain.ranks[:rank], tuple(changed), *plain.ranks[rank + 1 :]))

    (missing,) = faults(having([other for other in actions if other != action]))
    assert missing.startswith(f"{action} is missing")
    first, *_ = faults(having([*actions, action]))
    assert first.startswith(f"{action} (rank {rank}, place {len(actions)}) is doubled")


@EXAMPLES
@given(timed_schedules())
def test_receives_are_posted_in_the_channels_order_one_action_ahead_and_once(timed: tuple[Schedule, Times]) -> None:
    schedule, _ = timed
    carried = channels(schedule)
    needed_by = consumers(schedule)
    for rank, actions in enumerate(schedule.actions):
        posted: dict[Message, int] = {}
        order: dict[int, list[Action]] = {}
        for at, messages in enumerate(receives(schedule, rank)):
            for message in messages:
                assert message not in posted
                assert message.target == rank
                posted[message] = at
                order.setdefault(message.source, []).append(message.action)
        assert order == {source: queue for (source, target), queue in carried.items() if target == rank}
        for source, queue in order.items():
            ahead = [max(0, actions.index(needed_by[action]) - 1) for action in queue]
            for number, action in enumerate(queue):
                assert posted[Message(action, source, rank)] == min(ahead[number:]), (
                    "no later, and no earlier than that"
                )
