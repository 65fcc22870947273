"""Cost: published runs come out from their step times, and failures and spares are paid for."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name
from fivefold.plan.cluster import cluster
from fivefold.plan.cost import Cost, cost, cost_of
from fivefold.plan.goodput.failures import failures_of, spares_for
from fivefold.plan.goodput.formulas import THREE_TIERS, Tier, goodput
from tests.plan.runs import llama_405b

LLAMA = failures_of("llama3")


def deepseek(tokens: float, price: float | None = None) -> Cost:
    """DeepSeek-V3 on 2,048 H800: 180 thousand GPU-hours for 1e12 tokens, in steps of 15,360 x 4,096 tokens."""
    a_step = 15_360 * 4_096
    return cost(tokens, a_step, 180e3 * 3600 / 2048 * a_step / 1e12, 2048, price=price)


def test_deepseek_v3_has_2_664_million_gpu_hours_which_are_54_days_and_5_3_million_dollars_at_2() -> None:
    paid = deepseek(14.8e12, price=2.0)
    assert paid.busy_gpu_hours == pytest.approx(2.664e6, rel=1e-4)
    assert paid.calendar_days == pytest.approx(54.2, rel=0.001)
    assert paid.money == pytest.approx(5.328e6, rel=1e-4)


def test_bloom_has_106_days_of_steps_and_its_published_hours_at_400_watts_are_433_mwh() -> None:
    """104.7 s a step of 2,048 x 2,048 tokens, 366e9 tokens; 1,082,990 hours and 433,196 kWh (Luccioni et al. 2022)."""
    steps = cost(366e9, 2048 * 2048, 104.7, 384, watts=400, pue=1.0)
    assert steps.busy_days == pytest.approx(105.7, rel=0.001)
    assert steps.busy_gpu_hours == pytest.approx(1_082_990, rel=0.15)
    hours = cost(1e6, 1e6, 1_082_990 * 3600 / 384, 384, watts=400, pue=1.0)
    assert hours.energy_kwh == pytest.approx(433_196, rel=1e-6)


def test_failures_stretch_the_days_and_spares_are_paid_for() -> None:
    job = goodput(LLAMA, 16_384)
    spares = spares_for(LLAMA, 16_384, 86_400.0)
    alone, whole = (
        cost(15.6e12, 16e6, 5.0, 16_384, goodput=each, spare_gpus=gpus, price=2.0, watts=700.0)
        for each, gpus in ((None, 0), (job, spares.gpus))
    )
    assert alone.calendar_days == alone.busy_days == whole.busy_days == pytest.approx(975_000 * 5 / 86_400)
    assert whole.calendar_days == pytest.approx(whole.busy_days / job.ettr)
    assert whole.paid_gpu_hours == pytest.approx(whole.busy_gpu_hours / job.ettr * (16_384 + 152) / 16_384)
    assert whole.money == pytest.approx(2 * whole.paid_gpu_hours)
    assert whole.busy_money == alone.money == pytest.approx(2 * alone.busy_gpu_hours)
    assert whole.energy_kwh == pytest.approx(whole.paid_gpu_hours * 0.7 * 1.2)


def test_a_run_that_does_not_end_has_no_days_to_pay() -> None:
    job = goodput(failures_of(1e9), 8, [Tier("remote", 1e4, 5.0, 60.0, 1.0)])
    endless = cost(1e9, 1e6, 1.0, 8, goodput=job, price=2.0, watts=700.0)
    values = json.loads(json.dumps(endless.json(), allow_nan=False))
    assert {values[name] for name in ("calendar_days", "paid_gpu_hours", "money", "energy_kwh")} == {None}
    assert values["busy_money"] == 2.0 * values["busy_gpu_hours"] > 0
    assert endless.explain()[-1] == "calendar time: with an ETTR below 1.0% the run would not end"


def test_the_last_step_is_a_whole_one() -> None:
    assert [cost(tokens, 100, 1.0, 8).steps for tokens in (100, 101, 200, 3e9)] == [1, 2, 2, 30_000_000]


def test_a_run_is_paid_at_its_clusters_price_and_its_accelerators_power() -> None:
    run = llama_405b().model_copy(update={"steps": 100})
    paid = cost_of(run, cluster(by_name("h100"), 16_384, price=2.5), 10.0)
    assert (paid.steps, paid.gpus, paid.watts) == (100, 16_384, 700)
    assert paid.money == pytest.approx(1000 / 3600 * 16_384 * 2.5)
    free = cost_of(run, cluster(by_name("h100"), 16_384), 10.0)
    assert free.money is None
    assert not any("money" in line for line in free.explain())


def test_every_figure_is_explained_and_goes_into_json_with_where_it_comes_from() -> None:
    paid = cost(15.6e12, 16e6, 5.0, 16_384, goodput=goodput(LLAMA, 16_384), spare_gpus=152, price=2.0, watts=700.0)
    text = "\n".join(paid.explain())
    for figure in (
        "975,000 x 5 s = 56.42 days",
        "56.42 / 0.9422",
        "(16,384 + 152)",
        "x 2 = ",
        "x 700 W x 1.2",
        "3.09 h",
    ):
        assert figure in text
    values = json.loads(json.dumps(paid.json()))
    assert values["money"] == paid.money
    assert values["goodput"]["ettr"] == paid.ettr
    assert values["basis"]["ettr"] == "assumed"
    assert values["basis"]["pue"] == "assumed"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: cost(0, 1e6, 1.0, 8), "tokens is 0"),
        (lambda: cost(1e9, -1, 1.0, 8), "tokens of a step is -1"),
        (lambda: cost(1e9, 1e6, 0.0, 8), "time of a step is 0"),
        (lambda: cost(1e9, 1e6, float("inf"), 8), "time of a step is inf"),
        (lambda: cost(1e9, 1e6, 1.0, 0), "GPUs is 0"),
        (lambda: cost(15, 16e6, 1.0, 8), "15 tokens are less than one step of 16M"),
        (lambda: cost(1e9, 1e6, 1.0, 8, price=-2.0), "price is -2"),
        (lambda: cost(1e9, 1e6, 1.0, 8, watts=0.0), "power of a GPU is 0"),
        (lambda: cost(1e9, 1e6, 1.0, 8, pue=0.9), "a PUE of 0.9"),
        (lambda: cost(1e9, 1e6, 1.0, 8, spare_gpus=-8), "spare GPUs is -8"),
        (lambda: cost(1e9, 1e6, 1.0, 8, goodput=goodput(LLAMA, 16)), "goodput is that of 16 GPUs, and the run has 8"),
    ],
)
def test_what_cannot_be_is_refused_with_the_number(wrong: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError) as raised:
        wrong()
    assert says in str(raised.value)


def test_the_usual_tiers_are_those_of_the_documentation() -> None:
    assert [(tier.name, tier.interval, tier.stall, tier.load) for tier in THREE_TIERS] == [
        ("memory", 300, 0.5, 20),
        ("ssd", 1800, 2, 90),
        ("remote", 10_800, 5, 600),
    ]
