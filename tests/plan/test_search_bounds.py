"""What a search leaves out unseen: never what would have fit, or been faster, and enough of the rest to be quick.

Layouts, schedules and stacks are drawn from all that the search tries, for small models of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from statistics import median

import pytest

from fivefold.config.rules import LEGALITY, check, with_world
from fivefold.config.run import Batch, Data, Experts, LatentAttention, Model, Parallel, Run, Source
from fivefold.config.run import Cluster as Asked
from fivefold.hardware.catalogue import by_name
from fivefold.pipeline.memory import levels
from fivefold.pipeline.named import make_schedule
from fivefold.pipeline.stage_bytes import StageBytes, sizes_of
from fivefold.plan.cluster import cluster
from fivefold.plan.execution import Execution
from fivefold.plan.memory.peak import memory
from fivefold.plan.search.bounds import LeastMemory, least_seconds, lightest, waiting, without_end
from fivefold.plan.search.space import SCHEDULES, Degrees, degrees, run_of, schedules
from fivefold.plan.time.step import step_time

EXPERTS = Experts(experts=8, top_k=2, ffn=512, shared=1, dense_layers=2)
DENSE = Model(layers=16, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=8000)
LATENT = {
    "kv_heads": None,
    "moe": EXPERTS,
    "mtp": 1,
    "mla": LatentAttention(q_rank=256, kv_rank=128, plain=64, rotated=32, value=64),
}
MODELS = {
    "dense": DENSE,
    "tied": DENSE.model_copy(update={"tied": True, "vocab": 32000}),
    "sliding": DENSE.model_copy(update={"options": {"sliding_window": 256, "sliding_every": 2}}),
    "experts": DENSE.model_copy(update={"moe": EXPERTS}),
    "latent attention, experts and MTP": DENSE.model_copy(update=LATENT),
}
STACKS = ("fivefold", "megatron-2025", "torchtitan-2024", "deepspeed-2022", "deepseek-2024")
LAYOUTS, KINDS = 7, 3
"""So many are drawn of each model, cluster and stack, and of the schedules of each."""


@dataclass(frozen=True)
class Drawn:
    """A layout under a schedule: what a bound says, and what it really takes."""

    says: float
    takes: float
    what: str

    @property
    def share(self) -> float:
        return self.says / self.takes


@cache
def drawn() -> dict[str, list[Drawn]]:
    """By bound: `of` and `under` of memory, `plain` of a step under 1f1b, `schedule` of another, `light` of both by the
    lightest layout of the kind."""
    found: dict[str, list[Drawn]] = {name: [] for name in ("of", "under", "plain", "schedule", "light")}
    random = Random(0)
    for model in MODELS.values():
        for gpus, batch in ((16, 128), (4, 64)):
            run = with_world(
                Run(
                    name="drawn",
                    steps=1,
                    cluster=Asked(gpu="h100", gpus=gpus),
                    model=model,
                    data=Data(train=[Source(path=Path("none"))], seq_len=2048),
                    batch=Batch(global_size=batch, micro_size=1),
                    parallel=Parallel(),
                ),
                gpus,
            )
            layouts = list(degrees(run, cluster(by_name("h100"), gpus)))
            for name in STACKS:
                execution = Execution(name, 1.5 if model.moe and name == "fivefold" else 1.0)
                least = LeastMemory(run)
                for each in random.sample(layouts, LAYOUTS):
                    for bound, one in _bounds(run, each, execution, least, random):
                        found[bound].append(one)
    return found


def _bounds(
    run: Run, each: Degrees, execution: Execution, least: LeastMemory, random: Random
) -> Iterator[tuple[str, Drawn]]:
    on, software = cluster(by_name("h100"), int(run.cluster.gpus)), execution.software_of(each.zero, each.pp, each.ep)
    light = step_time(run_of(run, lightest(each)), on, execution.software_of(1, each.pp, each.ep))
    plain = step_time(run_of(run, each), on, software)
    yield "plain", Drawn(without_end(light), plain.seconds, str(each))
    kinds = [("1f1b", 1), *schedules(run, each)]
    for kind in random.sample(kinds, min(KINDS, len(kinds))):
        tried, what = run_of(run, each, *kind), f"{each} {kind} {execution}"
        if check(tried, on.gpus, LEGALITY):
            continue
        needed = memory(tried, on, software).worst.needed
        yield "of", Drawn(least.of(each, software), needed, what)
        yield "under", Drawn(least.under(each, software, *kind), needed, what)
        if kind != ("1f1b", 1):
            asked, seconds = (each.pp, each.microbatches(run), *kind), step_time(tried, on, software).seconds
            yield "schedule", Drawn(least_seconds(plain, *asked), seconds, what)
            yield "light", Drawn(least_seconds(light, *asked), seconds, what)


@pytest.mark.parametrize(
    ("bound", "typical", "nearest"),
    [
        ("of", 0.75, 0.985),
        ("under", 0.85, 0.995),
        ("plain", 0.85, 0.9999),
        ("schedule", 0.80, 0.98),
        ("light", 0.70, 0.98),
    ],
)
def test_no_layout_takes_less_than_its_bound_says_and_most_not_much_more(
    bound: str, typical: float, nearest: float
) -> None:
    """At the nearest so little more that a bound that said some percent more would be found out."""
    found = drawn()[bound]
    worst = max(found, key=lambda each: each.share)
    assert worst.share <= 1 + 1e-9, worst
    assert worst.share >= nearest
    assert median(each.share for each in found) >= typical


@pytest.mark.parametrize("name", ["1f1b", *SCHEDULES])
def test_a_rank_keeps_exactly_as_many_activations_as_the_closed_form_of_its_schedule_says(name: str) -> None:
    for ranks, microbatches in ((2, 1), (2, 4), (4, 3), (4, 6), (4, 8), (6, 13), (6, 20)):
        for chunks in {"interleaved": (2, 3), "zb-v": (2,), "dualpipe-v": (2,)}.get(name, (1,)):
            if name == "dualpipe-v" and microbatches < 2 * ranks:
                continue
            made = make_schedule(name, ranks, microbatches, chunks)
            sizes = sizes_of([StageBytes(0.0, 1.0, 0.0)] * (ranks * chunks))
            for rank, actions in enumerate(made.actions):
                kept = max(level.during for level in levels(list(actions), sizes))
                assert waiting(name, ranks, microbatches, chunks, rank) == kept
