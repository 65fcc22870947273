"""The layout search: nothing better is left out, a known layout is not better, and what it writes trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from fivefold.cli import commands
from fivefold.config.files import ConfigError, dump_run, load_run
from fivefold.config.models import preset_fields
from fivefold.config.rules import LEGALITY, check, with_world
from fivefold.config.run import RECOMPUTE_MODES, Batch, Data, Experts, Model, Parallel, Recompute, Run, Source
from fivefold.config.run import Cluster as Asked
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name
from fivefold.plan.cluster import Cluster, cluster
from fivefold.plan.memory.peak import memory
from fivefold.plan.search.best import Found, search
from fivefold.plan.search.ranking import Ranking
from fivefold.plan.search.reasons import Layout
from fivefold.plan.search.space import SCHEDULES, Zero, degrees, run_of, schedules
from fivefold.plan.software import fivefold
from fivefold.plan.time.step import step_time

DENSE = Model(layers=4, hidden=1024, heads=8, kv_heads=4, ffn=4096, vocab=32000)
MIXED = Model(
    layers=2, hidden=512, heads=8, kv_heads=4, ffn=2048, vocab=8000, moe=Experts(experts=8, top_k=2, ffn=1024)
)


def run_on(model: Model, gpu: str, gpus: int, seq_len: int, batch: int, micro: int = 1, mode: Any = "none",
           **parallel: Any) -> Run:  # fmt: skip
    return Run(
        name="searched",
        steps=1,
        cluster=Asked(gpu=gpu, gpus=gpus),
        model=model,
        data=Data(train=[Source(path=Path("none"))], seq_len=seq_len),
        batch=Batch(global_size=batch, micro_size=micro),
        parallel=Parallel(**parallel),
        recompute=Recompute(mode=mode),
    )


def machines(gpu: str, gpus: int, gib: float | None = None) -> Cluster:
    """A cluster whose GPUs have less memory than theirs."""
    accelerator = by_name(gpu)
    return cluster(accelerator if gib is None else replace(accelerator, memory=gib * 2**30), gpus)


def every_layout(run: Run, on: Cluster) -> Iterator[Run]:
    """All that there are, legal or not, of two GPUs: also those of which a search says that they are never faster."""
    axes_of_ranks = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 1)]
    experts = (1, 2) if run.model.moe else (1,)
    kinds = [("1f1b", 1), *((name, chunks) for name in SCHEDULES for chunks in (1, 2))]
    zeros: tuple[Zero, ...] = (0, 1, 3)
    axes = product(axes_of_ranks, experts, (1, 2), zeros, RECOMPUTE_MODES, kinds)
    for (tp, cp, pp), ep, micro, zero, mode, (name, chunks) in axes:
        if pp > 1 or name == "1f1b":
            parallel = Parallel(tp=tp, cp=cp, pp=pp, ep=ep, zero=zero, schedule=name, chunks=chunks)
            batch, recompute = run.batch.model_copy(update={"micro_size": micro}), Recompute(mode=mode)
            tried = run.model_copy(update={"parallel": parallel, "batch": batch, "recompute": recompute})
            yield with_world(tried, on.gpus)


def tried_layouts(run: Run, on: Cluster) -> Iterator[Run]:
    """All that a search tries."""
    for each in degrees(run, on):
        for kind in (("1f1b", 1), *schedules(run, each)):
            yield run_of(with_world(run, on.gpus), each, *kind)


def best_of_each_family(layouts: Iterator[Run], on: Cluster) -> list[float]:
    """Seconds of the ten best families, found by looking at each layout whole."""
    best: dict[tuple[int, ...], float] = {}
    for tried in layouts:
        if check(tried, on.gpus, LEGALITY):
            continue
        parallel = tried.parallel
        family = parallel.tp, parallel.pp, parallel.ep
        seconds = step_time(tried, on, fivefold(parallel.zero, parallel.pp)).seconds
        if seconds < best.get(family, inf) and memory(tried, on, fivefold(parallel.zero, parallel.pp)).fits:
            best[family] = seconds
    return sorted(best.values())[:10]


@pytest.mark.parametrize(
    ("layouts", "model", "gpus", "gib"),
    [
        (every_layout, DENSE, 2, 3.1),
        (every_layout, MIXED, 2, None),
        (tried_layouts, DENSE, 4, 2.6),
        (tried_layouts, MIXED, 4, 2.2),
    ],
    ids=["dense, little memory", "experts", "dense, little memory, 4 GPUs", "experts, little memory, 4 GPUs"],
)
def test_the_ten_best_are_those_of_looking_at_every_layout(
    layouts: Callable[[Run, Cluster], Iterator[Run]], model: Model, gpus: int, gib: float | None
) -> None:
    run, on = run_on(model, "h100", gpus, 1024 * 4 // gpus, gpus, mode="full"), machines("h100", gpus, gib)
    found = search(run, on)
    seconds = sorted(each.step.seconds for each in found.best)
    assert seconds == pytest.approx(best_of_each_family(layouts(run, on), on))
    assert all(each.memory.fits and not check(each.run, gpus) for each in found.best)


def test_of_layouts_that_are_as_fast_one_that_leaves_room_and_has_little_tp_is_recommended() -> None:
    def layout(seconds: float, tp: int, tight: bool, cp: int = 1) -> Layout:
        parallel = SimpleNamespace(tp=tp, cp=cp)
        made = SimpleNamespace(
            step=SimpleNamespace(seconds=seconds), run=SimpleNamespace(parallel=parallel), tight=tight
        )
        return cast(Layout, made)

    every = [
        layout(1.0, 2, True),
        layout(1.01, 4, False),
        layout(1.02, 2, False, cp=2),
        layout(1.025, 2, False),
        layout(1.04, 1, False),
    ]
    ranking = Ranking(4, {(number,): each for number, each in enumerate(every)})
    assert ranking.shown() == (every[3], every[0], every[1], every[2])
    assert Ranking(4, {(0,): every[0], (1,): every[4]}).shown() == (every[0], every[4])
    assert Ranking(4).shown() == ()


def test_the_tokens_of_a_model_like_deepseek_v3_stay_inside_nodes_if_its_experts_fit_there() -> None:
    """Over 8 nodes, as published with weights of 8 bits, a token goes to 3.6 of them, each time by the network."""
    model = Model.model_validate(preset_fields("deepseek-v3").value | {"vocab": 129280})
    run = run_on(model, "h800", 2048, 4096, 15360, pp=16, ep=64, dp=128)
    found = search(run, machines("h800", 2048))
    assert found.best[0].run.parallel.ep == 8
    assert found.best[0].step.seconds <= 1.03 * min(each.step.seconds for each in found.best)
    assert found.best[0].step.parts["ep"] < 0.4 * step_time(run, machines("h800", 2048), fivefold()).parts["ep"]


def test_the_best_is_no_worse_than_a_published_layout_that_the_search_is_not_told() -> None:
    """BLOOM with 6 of its 70 layers, on as many GPUs as one replica's, with 4 microbatches a rank."""
    bloom = Model.model_validate(preset_fields("bloom-176b").value | {"vocab": 250880})
    model = bloom.model_copy(update={"layers": 6})
    told = run_on(model, "a100-sxm-80gb", 8, 2048, 16, micro=2, mode="full", tp=4, pp=2, dp=1)
    on = machines("a100-sxm-80gb", 8)
    found = search(told.model_copy(update={"parallel": Parallel(tp=3)}), on)
    assert found.own.verdict == "illegal"
    assert found.best[0].step.seconds <= 1.05 * step_time(told, on, fivefold(1, 2)).seconds


SMALL = run_on(DENSE, "h100", 8, 2048, 8, mode="full", dp=8, zero=3)


@pytest.fixture(scope="module")
def found() -> Found:
    return search(SMALL, machines("h100", 8, 3.4))


def test_the_users_layout_is_told_what_it_costs_more(found: Found) -> None:
    assert found.own.verdict == "worse"
    told = "\n".join(found.lines())
    assert "your layout (dp 8, micro 1, zero 3, recompute full)" in told
    assert "recompute +" in told
    parts = found.json()["own"]["against_best"]
    assert parts["recompute"] > 0


def test_an_illegal_layout_is_answered_with_its_rules() -> None:
    run = run_on(DENSE, "h100", 8, 2048, 8, tp=3)
    own = search(run, machines("h100", 8)).own
    assert own.verdict == "illegal"
    assert own.json()["rules"] == check(run, 8, LEGALITY)


def test_a_layout_without_room_is_answered_with_numbers() -> None:
    own = search(run_on(DENSE, "h100", 8, 2048, 8, dp=8, zero=0), machines("h100", 8, 3.4)).own
    assert own.verdict == "does not fit"


def test_what_comes_nearest_is_told_if_nothing_fits() -> None:
    found = search(SMALL, machines("h100", 8, 1.0))
    assert not found.best
    assert found.miss is not None
    assert "no layout fits; the nearest, " in "\n".join(found.lines())
    assert "too few" in "\n".join(found.lines())
    with pytest.raises(UserError, match="no layout fits"):
        found.write(Path("never.yaml"))


def test_what_is_written_is_the_run_with_the_best_layout(found: Found, tmp_path: Path) -> None:
    found.write(tmp_path / "best.yaml")
    run = load_run(tmp_path / "best.yaml")
    assert not check(run)
    assert run == found.best[0].run
    same = {"parallel", "batch", "recompute"}
    assert run.model_dump(exclude=same) == SMALL.model_dump(exclude=same)
    assert run.batch.global_size == SMALL.batch.global_size


def test_a_run_that_this_version_cannot_train_is_not_written(tmp_path: Path) -> None:
    precision = SMALL.precision.model_copy(update={"linear": "fp8-block"})
    narrow = search(SMALL.model_copy(update={"precision": precision}), machines("h100", 8))
    assert narrow.best
    with pytest.raises(ConfigError, match="8-bit"):
        narrow.write(tmp_path / "best.yaml")
    assert not (tmp_path / "best.yaml").exists()


def test_the_command_searches_and_writes(tmp_path: Path) -> None:
    file, best = tmp_path / "run.yaml", tmp_path / "best.yaml"
    file.write_text(dump_run(SMALL))
    words = ["plan", str(file), "--search", "--write", str(best), "--json", "--parallel.tp", "3"]
    answer = CliRunner().invoke(commands, words)
    assert answer.exit_code == 0, answer.output
    shown = json.loads(answer.stdout)
    assert shown["own"]["verdict"] == "illegal"
    assert load_run(best).parallel.model_dump() == shown["best"][0]["parallel"]
