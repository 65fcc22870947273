"""The executor runs a schedule as it stands, says what is left over at its end, and names whom it waits for in vain."""

from __future__ import annotations

import functools
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fivefold.config.run import Model
from fivefold.data.loader import IGNORE, Microbatch
from fivefold.errors import RunError
from fivefold.model.family import family
from fivefold.model.ledger import Ledger
from fivefold.model.part import WHOLE
from fivefold.parallel.links import Links
from fivefold.pipeline.check import faults
from fivefold.pipeline.execute import Pipeline
from fivefold.pipeline.flow import gives, needs
from fivefold.pipeline.named import SCHEDULES, make_schedule
from fivefold.pipeline.schedule import Action, Kind, Schedule, Step, looped, v_shaped
from fivefold.pipeline.times import Times
from tests.parity.cases import MODELS, Case, randomize_vectors
from tests.parity.pieces import TOLERANCE, Pieces, piece
from tests.parity.pieces import faults as wrong
from tests.parity.rank import Rank
from tests.ranks import Crew, context, crew, kept

FULL: tuple[Kind, ...] = ("F", "B")
SPLIT: tuple[Kind, ...] = ("F", "I", "W")
BUILT_AS = {(False, 1): "1f1b", (False, 2): "interleaved", (True, 2): "zb-v"}
"""By whether stages go down and up again, and chunks a rank: a schedule that has them so."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """The processes, in groups of two or four."""
    with crew(tmp_path_factory.mktemp("ranks")) as started:
        yield started


def model_of(stages: int) -> Model:
    """One layer a stage."""
    return MODELS["narrow"].model_copy(update={"layers": stages})


def microbatches(count: int) -> list[Microbatch]:
    """One sequence each, no two neighbours of one length, some without a label."""
    generator = torch.Generator().manual_seed(count)
    found = []
    for number in range(count):
        tokens = torch.randint(0, 13, (1, 4 + number % 3), generator=generator)
        labels = tokens.roll(-1)
        labels[:, (number + 2) % 5 :] = IGNORE
        found.append(Microbatch(tokens, labels, None, packed=False))
    return found


def labels_of(count: int) -> int:
    return sum(int((each.labels >= 0).sum()) for each in microbatches(count))


def ledger_of(count: int) -> Ledger:
    return Ledger(MODELS["narrow"], labels_of(count), (), torch.device("cpu"))


def pipeline_of(schedule: Schedule) -> tuple[Rank, Pipeline]:
    """This rank of a model that is cut as the schedule wants it, kept for the group's life, and what runs it."""
    if schedule.placement not in kept:
        pp = len(schedule.ranks)
        chunks = schedule.stages // pp
        case = Case(
            "narrow", pp=pp, schedule=BUILT_AS[schedule.placement == v_shaped(pp), chunks], chunks=chunks, micro=1
        )
        kept[schedule.placement] = Rank(case, model=model_of(schedule.stages))
    rank = kept[schedule.placement]
    built = rank.pipeline
    assert built.schedule.placement == schedule.placement
    return rank, Pipeline(built.model, built.stages, built.accumulations, schedule, built.links, built.boundary)


def run(schedule: Schedule) -> tuple[list[str], float, Pieces]:
    """The actions of this rank in the order in which they ran, its share of the loss, and its gradients."""
    rank, pipeline = pipeline_of(schedule)
    with pipeline.clock.recording() as spans:
        loss = pipeline.train(microbatches(schedule.microbatches), ledger_of(schedule.microbatches))
    assert [start for _, start, _ in spans] == sorted(start for _, start, _ in spans)
    named = zip(rank.state.items(), rank.optimizer.gradients(), strict=True)
    gradients = {name: piece(each.whole, gradient) for (name, each), gradient in named}
    for stage in pipeline.stages.values():
        stage.zero_grad(set_to_none=True)
    return [action for action, _, _ in spans], loss.item(), gradients


@functools.cache
def alone(stages: int, count: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the whole model."""
    spec = model_of(stages)
    model = family(spec).build(spec, WHOLE).double()
    parameters = dict(model.named_parameters())
    family(spec).initialize(parameters, spec, 0)
    randomize_vectors("narrow", parameters)
    loss = sum(model(each.tokens, each.labels) for each in microbatches(count)) / labels_of(count)
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in parameters.items()}


@st.composite
def named(draw: st.DrawFn, ranks: int) -> Schedule:
    """A schedule as anyone can ask for it."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    chunks = SCHEDULES[name].chunks or draw(st.integers(1, 2))
    fewest = SCHEDULES[name].fewest(ranks)
    took = tuple(draw(st.lists(st.floats(0.1, 10), min_size=ranks * chunks, max_size=ranks * chunks)))
    times = Times(took, took[::-1], took, latency=draw(st.floats(0, 3)))
    return make_schedule(name, ranks, draw(st.integers(fewest, max(fewest, 7))), chunks, times)


@st.composite
def drawn(draw: st.DrawFn, ranks: int) -> Schedule:
    """Nobody's schedule: what comes next is drawn from all that can run, and so is which backwards are split."""
    placement = draw(st.sampled_from([looped(ranks, 1), looped(ranks, 2), v_shaped(ranks)]))
    microbatches = draw(st.integers(1, 5))
    chance = random.Random(draw(st.integers(0, 2**32)))
    waiting = [
        Action(kind, stage, number)
        for stage, number in product(range(len(placement)), range(microbatches))
        for kind in chance.choice((FULL, SPLIT))
    ]
    ordered: list[list[Step]] = [[] for _ in range(ranks)]
    made: set[Action | None] = {None}
    while waiting:
        action = chance.choice([each for each in waiting if needs(each, len(placement)) in made])
        waiting.remove(action)
        made.add(gives(action))
        ordered[placement[action.stage]].append(action)
    return Schedule("drawn", tuple(map(tuple, ordered)), placement, microbatches)


def assert_runs_as_it_stands(schedule: Schedule, ranks: Crew) -> None:
    """Its order is that of what ran, and gradients are those of one process."""
    assert faults(schedule) == []
    by_rank = ranks.run(len(schedule.ranks), run, schedule)
    assert [order for order, _, _ in by_rank] == [list(map(str, actions)) for actions in schedule.actions]
    loss, gradients = alone(schedule.stages, schedule.microbatches)
    assert sum(share for _, share, _ in by_rank) == pytest.approx(loss, rel=TOLERANCE)
    assert list(wrong("gradient", gradients, [pieces for _, _, pieces in by_rank], TOLERANCE)) == []


MANY = settings(max_examples=15, deadline=None)
FEW = settings(max_examples=8, deadline=None)


@MANY
@given(named(2))
def test_two_ranks_run_any_named_schedule_in_its_order(ranks: Crew, schedule: Schedule) -> None:
    assert_runs_as_it_stands(schedule, ranks)


@MANY
@given(drawn(2))
def test_two_ranks_run_whatever_is_sound_in_its_order(ranks: Crew, schedule: Schedule) -> None:
    assert_runs_as_it_stands(schedule, ranks)


@FEW
@given(st.one_of(named(4), drawn(4)))
def test_four_ranks_run_whatever_is_sound_in_its_order(ranks: Crew, schedule: Schedule) -> None:
    assert_runs_as_it_stands(schedule, ranks)


def without(schedule: Schedule, *dropped: str) -> Schedule:
    """The schedule with some actions left out, which no checker would let pass."""
    kept_ones = tuple(tuple(step for step in steps if str(step) not in dropped) for steps in schedule.ranks)
    return replace(schedule, ranks=kept_ones)


def complaint(schedule: Schedule) -> str:
    """What the executor says on this rank."""
    _, pipeline = pipeline_of(schedule)
    del kept[schedule.placement]  # it is of no use afterwards
    try:
        pipeline.train(microbatches(schedule.microbatches), ledger_of(schedule.microbatches))
    except RunError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize(
    ("schedule", "dropped", "left"),
    [
        ("zb-h1", ["0W2"], ["0I2", None]),
        ("zb-h1", ["0W3", "1W0", "1W1"], ["0I3", "1I0, 1I1"]),
        ("1f1b", ["0B3", "1B3"], ["0F3", "1F3"]),
        ("zb-v", ["1I3", "1W3", "0I3", "0W3"], ["0F3", "2B3, 1F3"]),
    ],
)
def test_what_is_left_over_at_the_end_is_an_error_that_names_its_maker(
    schedule: str, dropped: list[str], left: list[str | None], ranks: Crew
) -> None:
    broken = without(make_schedule(schedule, 2, 4, SCHEDULES[schedule].chunks or 1), *dropped)
    assert faults(broken) != []
    assert ranks.run(2, complaint, broken) == [
        "none"
        if makers is None
        else f"the schedule {schedule} has ended on pipeline rank {rank}, and nothing has used what {makers} made"
        for rank, makers in enumerate(left)
    ]


def gone(*_: Any) -> Any:
    """What gloo does where it knows already that the other rank has left."""
    raise RuntimeError("connection closed")


def complaint_at(operation: str) -> str:
    """What the first rank says if it cannot begin to send, or to receive. The other one does nothing."""
    schedule = make_schedule("1f1b", 2, 2)
    pipeline_of(schedule)
    with patch.object(Links, operation, gone):
        words = complaint(schedule) if dist.get_rank() == 0 else ""
    kept.pop(schedule.placement, None)
    return words


@pytest.mark.parametrize(
    ("operation", "says"),
    [("send", "sending 0F0 to pipeline rank 1"), ("receive", "before 0F1, asking for 1B0 of pipeline rank 1")],
)
def test_a_rank_that_is_gone_already_is_named_too(operation: str, says: str, ranks: Crew) -> None:
    expected = f"the pipeline stopped: pipeline rank 0 {says}: connection closed"
    assert ranks.run(2, complaint_at, operation)[0] == expected


GPIPE = make_schedule("gpipe", 2, 4)
SILENCE_S = 2.0


def meet(rank: int, folder: Path) -> Pipeline:
    """A pipeline of two ranks whose transfers wait for two seconds at most."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), 2), rank=rank, world_size=2)
    _, pipeline = pipeline_of(GPIPE)
    brief = [dist.new_group(timeout=timedelta(seconds=SILENCE_S)) for _ in range(2)]
    pipeline.links = Links(rank, 2, *brief)
    pipeline.connect()
    dist.barrier()
    return pipeline


def survive(folder: Path, answer: Connection) -> None:
    """Rank 0: what it says when the other one does not go on, and after how many seconds."""
    pipeline = meet(0, folder)
    since = time.monotonic()
    try:
        pipeline.train(microbatches(4), ledger_of(4))
    except RunError as error:
        answer.send((str(error), time.monotonic() - since))
    os._exit(0)


def stop(folder: Path, at: str, how: str) -> None:
    """Rank 1, which dies or falls silent when it would begin an action."""
    pipeline = meet(1, folder)
    during = pipeline.clock.during

    @contextmanager
    def stopping(action: Action) -> Iterator[None]:
        if str(action) == at:
            os._exit(0) if how == "dies" else time.sleep(60)
        with during(action):
            yield

    pipeline.clock.during = stopping  # type: ignore[method-assign]
    pipeline.train(microbatches(4), ledger_of(4))


def last_words(folder: Path, at: str, how: str) -> tuple[str, float]:
    """What rank 0 says when rank 1 stops."""
    here, there = context.Pipe()
    both = [
        context.Process(target=survive, args=(folder, there), daemon=True),
        context.Process(target=stop, args=(folder, at, how), daemon=True),
    ]
    for process in both:
        process.start()
    assert here.poll(60), "the survivor says something"
    words = here.recv()
    for process in both:
        process.kill()
        process.join()
    return words


def test_a_rank_that_dies_is_named_with_the_action_that_needs_it(tmp_path: Path) -> None:
    words, _ = last_words(tmp_path, "1B1", "dies")
    says = "pipeline rank 0 (in|before) 0B[01], (which needs|asking for) 1B[01] of pipeline rank 1"
    assert re.match(f"the pipeline stopped: {says}: .*[Cc]onnection", words), words


def test_a_rank_that_falls_silent_is_named_when_time_is_up_with_the_action_that_needs_it(tmp_path: Path) -> None:
    words, seconds = last_words(tmp_path, "1B1", "falls silent")
    start = "the pipeline stopped: pipeline rank 0 in 0B1, which needs 1B1 of pipeline rank 1: "
    assert words.startswith(start), words
    assert SILENCE_S <= seconds < 3 * SILENCE_S
