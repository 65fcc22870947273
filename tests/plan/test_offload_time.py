"""Offload in time: what does not hide beside computation is added, and what the CPU updates takes what it measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fivefold.config.models import preset_fields
from fivefold.config.run import Batch, Data, Model, Parallel, Precision, Run
from fivefold.hardware.accelerator import Measured
from fivefold.hardware.catalogue import by_name
from fivefold.model.spec import parameters
from fivefold.pipeline.layer_bytes import LayerCount
from fivefold.plan.cluster import Cluster, cluster
from fivefold.plan.time.offload import UPDATE, WEIGHTS
from fivefold.plan.time.step import step_time

ONE = cluster(by_name("h200"), 1)
TWO = cluster(by_name("h200"), 2)


def run(offload: list[Any], batch: int = 1, precision: Precision | None = None, **parallel: Any) -> Run:
    model = dict(preset_fields("llama-3-8b").value) | {"layers": 16, "vocab": 128_256}
    return Run(
        name="moved",
        steps=1,
        model=Model.model_validate(model),
        data=Data(train=[], seq_len=8192),
        batch=Batch(global_size=batch, micro_size=1),
        parallel=Parallel(**{"dp": 1, "zero": 1, **parallel}),
        precision=precision or Precision(),
        offload=offload,
    )


def linked(rate: float) -> Cluster:
    """One accelerator whose copies to CPU memory were measured at so many bytes/s, and back at twice that."""
    return replace(ONE, accelerator=replace(ONE.accelerator, measured=Measured(host={"to": rate, "from": 2 * rate})))


def test_activations_take_what_their_way_is_longer_than_each_pass() -> None:
    slow, plain = linked(20e9), step_time(run([]), linked(20e9))
    way = 16 * LayerCount(run([])).saved(0) / 20e9
    forward, of_input, of_weight = plain.stages[0]
    assert way > of_input + of_weight
    added = (way - forward) + (way - of_input - of_weight)
    found = step_time(run(["activations"]), slow)
    assert found.seconds == pytest.approx(plain.seconds + added, rel=1e-12)
    assert found.parts["offload"] == pytest.approx(added, rel=1e-12)


def test_over_a_fast_link_activations_travel_unseen() -> None:
    assert step_time(run(["activations"]), linked(1e12)).seconds == step_time(run([]), linked(1e12)).seconds


def test_without_a_measurement_copies_take_a_share_of_the_datasheet_and_shared_memory_takes_none() -> None:
    known = step_time(run(["activations"]), ONE).parts["offload"]
    measured = step_time(run(["activations"]), linked(0.87 * ONE.accelerator.pcie)).parts["offload"]
    assert known == pytest.approx(measured, rel=1e-12)
    shared = replace(ONE, accelerator=replace(ONE.accelerator, pcie=0.0))
    assert step_time(run(["activations"]), shared).parts.get("offload", 0.0) == 0


def test_of_a_pipeline_the_stages_that_move_activations_are_longer() -> None:
    slow = replace(TWO, accelerator=linked(20e9).accelerator)
    plain, heavy, whole = (
        step_time(run(each, batch=8, pp=2), slow).stages for each in ([], ["heavy-activations"], ["activations"])
    )
    assert [sum(stage) for stage in whole] > [sum(stage) for stage in heavy]
    assert sum(heavy[0]) > sum(plain[0])
    assert heavy[1] == plain[1]
    assert all(sum(after) > sum(before) for before, after in zip(plain, whole, strict=True))


def test_an_update_in_cpu_memory_takes_what_a_host_was_measured_to() -> None:
    size = parameters(run([]).model).total
    assert step_time(run(["optimizer"]), ONE).parts["optimizer"] == pytest.approx(28 * size / UPDATE, rel=1e-3)
    both = step_time(run(["optimizer", "parameters"]), ONE).parts["optimizer"]
    assert both == pytest.approx(28 * size / UPDATE + 2 * 4 * size / WEIGHTS, rel=1e-3)
    gathered_often = step_time(run(["optimizer", "parameters"], batch=8, dp=2, zero=3), TWO).parts["optimizer"]
    assert gathered_often == pytest.approx((28 * size / UPDATE + (1 + 8) * 4 * size / WEIGHTS) / 2, rel=1e-3)


def test_states_in_16_bits_are_updated_with_as_many_bytes_fewer() -> None:
    half = Precision(master="bf16", moments="bf16", reduce="bf16")
    whole, less = (step_time(run([], precision=each), ONE).parts["optimizer"] for each in (None, half))
    assert less / whole == pytest.approx((2 * 6 + 2 * 2 + 2) / (2 * 12 + 2 * 4 + 2))
