"""The bound from below decides nothing that the memory of a run would not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fivefold.config.run import Cluster as Machines
from fivefold.config.run import Recompute, Run
from fivefold.plan.cluster import Cluster, cluster_of
from fivefold.plan.execution import OURS, Execution
from fivefold.plan.memory.fits import memory_if_it_fits
from fivefold.plan.planned import plan
from tests.plan.runs import llama_405b

LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"schedule": "zb-v", "chunks": 2},
    {"schedule": "interleaved", "chunks": 4},
    {"pp": 1, "dp": 2048, "zero": 3},
    {"schedule": "zb-h2"},
    {"layers_per_stage": [9, *[8] * 14, 5]},
)


def on(layout: dict[str, Any], **others: Any) -> tuple[Run, Cluster]:
    asked = llama_405b(**layout).model_copy(update={"cluster": Machines(gpu="h100"), **others})
    run = plan(asked).run
    return run, cluster_of(run)


def with_memory(cluster: Cluster, size: float) -> Cluster:
    return replace(cluster, accelerator=replace(cluster.accelerator, memory=size))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_run_fits_from_the_byte_on_from_which_its_memory_does(layout: dict[str, Any], mode: str) -> None:
    run, cluster = on(layout, recompute=Recompute(mode=mode))  # type: ignore[arg-type]
    needed = OURS.memory(run, cluster).worst.needed
    enough, short = with_memory(cluster, needed), with_memory(cluster, needed - 1)
    assert memory_if_it_fits(run, enough, OURS) == OURS.memory(run, enough)
    assert memory_if_it_fits(run, short, OURS) is None


def test_far_too_little_is_told_without_a_walk_through_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    run, cluster = on({})

    def walk(*_: Any) -> None:
        raise AssertionError("walked")

    monkeypatch.setattr(Execution, "memory", walk)
    assert memory_if_it_fits(run, with_memory(cluster, 1e9), OURS) is None
