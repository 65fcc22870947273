"""Goodput: the published table by the formulas, and a simulation of each failure that agrees with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import exp, expm1, factorial, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import UserError
from fivefold.plan.goodput.events import LEMON_SHAPE, Fleet, Progress, Simulated, simulate_goodput
from fivefold.plan.goodput.failures import (
    LLAMA_3_CAUSES,
    RATES,
    failures_of,
    failures_of_mttf,
    poisson_quantile,
    spares_for,
)
from fivefold.plan.goodput.formulas import (
    THREE_TIERS,
    Tier,
    best_interval,
    daly_interval,
    ettr,
    first_order_ettr,
    goodput,
    one_tier,
    tiers_ettr,
    tiers_first_order,
    young_interval,
)
from fivefold.plan.quantities import count

LLAMA = failures_of("llama3")
HOUR = 3600.0

TABLE = [
    ("llama3", 16_384, 3.09, (0.650, 0.796, 0.945, 0.980)),
    ("rsc1", 16_384, 1.80, (0.527, 0.720, 0.919, 0.970)),
    ("rsc1", 4_096, 7.21, (0.796, 0.876, 0.969, 0.989)),
    ("rsc2", 16_384, 5.01, (0.741, 0.847, 0.961, 0.986)),
    ("rsc1", 131_072, 0.23, (0.100, 0.259, 0.652, 0.841)),
]
COLUMNS = ((120.0, 3600.0), (120.0, 900.0), (5.0, 300.0), (0.5, 120.0))
"""Stall and restart of each column."""


def three_tiers(memory: float) -> list[Tier]:
    """The usual three, where memory serves that share and nine tenths of the others find the SSDs."""
    shares = (memory, 0.9 * (1 - memory), 0.1 * (1 - memory))
    return [
        Tier(tier.name, tier.interval, tier.stall, tier.load, share)
        for tier, share in zip(THREE_TIERS, shares, strict=True)
    ]


@pytest.mark.parametrize(("name", "gpus", "hours", "cells"), TABLE)
def test_the_table_of_published_rates_comes_out_at_the_best_interval(
    name: str, gpus: int, hours: float, cells: tuple[float, ...]
) -> None:
    mttf = failures_of(name).mttf(gpus)
    assert mttf / HOUR == pytest.approx(hours, abs=0.006)
    found = [ettr(best_interval(stall, mttf), stall, restart, mttf) for stall, restart in COLUMNS]
    assert found == pytest.approx(cells, abs=0.003)


@pytest.mark.parametrize(("memory", "expected"), [(0.75, 0.940), (0.95, 0.965)])
def test_three_tiers_come_out_by_both_formulas(memory: float, expected: float) -> None:
    for found in (tiers_ettr, tiers_first_order):
        assert found(three_tiers(memory), 120.0, 3.1 * HOUR) == pytest.approx(expected, abs=0.003)


@pytest.mark.parametrize(("stall", "restart"), COLUMNS)
@pytest.mark.parametrize("mttf", [800.0, 11_000.0, 1e6])
def test_no_other_interval_is_better_than_the_best_and_daly_and_young_come_near_it(
    stall: float, restart: float, mttf: float
) -> None:
    best = best_interval(stall, mttf)
    at_best = ettr(best, stall, restart, mttf)
    assert all(ettr(best * factor, stall, restart, mttf) < at_best for factor in (0.9, 0.99, 1.01, 1.1))
    assert daly_interval(stall, mttf) == pytest.approx(best, rel=0.01)
    assert young_interval(stall, mttf) == pytest.approx(best, rel=0.35)


def test_one_tier_has_the_exact_formula_and_small_times_the_first_order() -> None:
    tier = one_tier(120.0, 800.0, 11_000.0)
    assert tiers_ettr([tier], 100.0, 11_000.0) == pytest.approx(ettr(tier.interval, 120.0, 900.0, 11_000.0), rel=1e-12)
    assert ettr(3e3, 1.0, 60.0, 1e6) == pytest.approx(first_order_ettr(3e3, 1.0, 60.0, 1e6), abs=1e-5)
    assert tiers_ettr(THREE_TIERS, 120.0, 1e8) == pytest.approx(tiers_first_order(THREE_TIERS, 120.0, 1e8), abs=2e-5)


def test_without_failures_only_the_stalls_are_lost_and_with_endless_ones_everything() -> None:
    safe = goodput(failures_of(0.0), 8)
    assert safe.mttf == inf
    assert safe.ettr == pytest.approx(1 / (1 + 0.5 / 300 + 2 / 1800 + 5 / 10_800))
    assert json.loads(json.dumps(safe.json()))["mttf"] is None
    assert ettr(1e6, 1.0, 1.0, 10.0) == 0.0
    with pytest.raises(UserError, match="never gets on"):
        goodput(failures_of(5e7), 16_384, [Tier("remote", 10_800.0, 5.0, 600.0, 1.0)]).calendar_days(3)


def test_a_job_that_gets_on_in_less_than_a_hundredth_of_its_time_does_not_end() -> None:
    seldom, often = (goodput(LLAMA, 512, [Tier("a", days * 86_400.0, 0.0, 600.0, 1.0)]) for days in (20, 52.55))
    assert (seldom.ends, often.ends) == (True, False)
    assert often.ettr == pytest.approx(3.7e-5, rel=0.02)
    with pytest.raises(UserError, match="never gets on"):
        often.calendar_days(52.55)


def test_days_of_training_become_calendar_days() -> None:
    job = goodput(LLAMA, 16_384, three_tiers(0.75))
    assert job.calendar_days(50) == pytest.approx(50 / job.ettr)
    text = "\n".join(job.explain())
    for figure in (
        "3.789",
        "(16,384 / 8 x 3.789)",
        "3.09 h",
        "0.5/300 + 2/1800 + 5/10800",
        "75.0%",
        f"= {job.ettr:.4f}",
    ):
        assert figure in text


def brute_force(start: float, up: float, tiers: list[Tier]) -> tuple[float, list[float]]:
    """The job walked from checkpoint to checkpoint; whole numbers of seconds, so that it is exact."""
    position, clock, saved = start, 0.0, [start // tier.interval * tier.interval for tier in tiers]
    while True:
        ends = [(position // tier.interval + 1) * tier.interval for tier in tiers]
        end = min(ends)
        if clock + end - position > up:
            return position + up - clock, saved
        clock += end - position
        position = end
        due = [number for number, stop in enumerate(ends) if stop == end]
        clock += sum(tiers[number].stall for number in due)
        if clock > up:
            return position, saved
        for number in due:
            saved[number] = end


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(5, 60), st.integers(0, 5)), min_size=1, max_size=3, unique_by=lambda tier: tier[0]),
    st.integers(0, 40),
    st.integers(0, 2000),
)
def test_how_far_a_job_gets_and_what_it_has_saved_is_that_of_walking_there(
    grid: list[tuple[int, int]], begun: int, up: int
) -> None:
    tiers = [Tier("any", float(interval), float(stall), 0.0, 1.0) for interval, stall in sorted(grid)]
    start = begun * tiers[0].interval
    reached, saved = Progress(tiers).run(start, up + 0.5)
    expected, expected_saved = brute_force(start, up + 0.5, tiers)
    assert reached == pytest.approx(expected, abs=1e-4)
    assert saved == pytest.approx(expected_saved)


@pytest.fixture(scope="module")
def usual() -> Simulated:
    """The three tiers at Llama 3's rate, with all that the formula leaves out switched off."""
    return simulate_goodput(Fleet(16_384, LLAMA, swapped=0.0), three_tiers(0.75), failures=3000)


@pytest.mark.parametrize(("stall", "restart"), COLUMNS[:3])
def test_the_simulation_agrees_with_the_exact_formula(stall: float, restart: float) -> None:
    mttf = LLAMA.mttf(16_384)
    tier = one_tier(stall, restart - 120, mttf)
    found = simulate_goodput(Fleet(16_384, LLAMA, swapped=0.0), [tier], failures=1500)
    expected = ettr(tier.interval, stall, restart, mttf)
    assert found.ettr == pytest.approx(expected, rel=0.02)
    assert abs(found.ettr - expected) < 4 * found.error


def test_the_simulation_agrees_with_the_formula_of_several_tiers(usual: Simulated) -> None:
    assert usual.ettr == pytest.approx(tiers_ettr(three_tiers(0.75), 120.0, LLAMA.mttf(16_384)), rel=0.01)
    assert usual.times.stalls / usual.times.total == pytest.approx(0.0032, rel=0.05)
    assert usual.error < 0.004


def test_a_job_goes_back_to_the_newest_checkpoint_that_is_left_and_not_to_that_of_the_fastest_tier() -> None:
    """Every 500 s and every 700 s together leave gaps whose mean age is 135e4 / 7000 s, and 250 s alone."""
    fleet = Fleet(8, failures_of_mttf(30.0, 8), swapped=0.0)
    one, two = Tier("memory", 500.0, 0.0, 20.0, 1.0), Tier("remote", 700.0, 0.0, 600.0, 0.0)
    alone, both = (simulate_goodput(fleet, tiers, failures=2000) for tiers in ([one], [one, two]))
    assert alone.times.lost / alone.failures == pytest.approx(250, rel=0.05)
    assert both.times.lost / both.failures == pytest.approx(135e4 / 7000, rel=0.05)


def test_the_formula_of_several_tiers_holds_where_failures_are_frequent_and_the_first_order_does_not() -> None:
    often = failures_of_mttf(0.5, 1024)
    found = simulate_goodput(Fleet(1024, often, swapped=0.0), three_tiers(0.75), failures=3000).ettr
    assert found == pytest.approx(tiers_ettr(three_tiers(0.75), 120.0, 1800.0), rel=0.03)
    assert tiers_first_order(three_tiers(0.75), 120.0, 1800.0) < 0.95 * found


def test_lemon_nodes_that_stay_change_little_and_ones_that_are_excluded_much() -> None:
    tier, lemons = one_tier(5.0, 180.0, LLAMA.mttf(16_384)), Fleet(16_384, LLAMA, lemon_shape=LEMON_SHAPE)
    stay = simulate_goodput(lemons, [tier], failures=1000)
    assert stay.ettr == pytest.approx(ettr(tier.interval, 5.0, 300.0, LLAMA.mttf(16_384)), rel=0.01)
    leave = simulate_goodput(replace(lemons, excluded_after=2), [tier], failures=1000)
    assert leave.times.total > 2 * stay.times.total
    assert leave.ettr > stay.ettr + 0.02


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_small_fleet_of_lemons_fails_as_often_as_published(seed: int) -> None:
    fleet = Fleet(64, LLAMA, lemon_shape=0.3, swapped=0.0)
    job = simulate_goodput(fleet, [one_tier(5.0, 180.0, fleet.mttf)], failures=1000, seed=seed)
    assert (job.times.total - job.times.restarts) / job.failures == pytest.approx(LLAMA.mttf(64), rel=0.1)


def test_the_shape_of_the_lemons_lets_3_of_63_nodes_cause_half_of_the_failures() -> None:
    rates = np.sort(np.random.default_rng(0).gamma(LEMON_SHAPE, 1 / LEMON_SHAPE, (4000, 63)), axis=1)
    assert np.median(rates[:, -3:].sum(axis=1) / rates.sum(axis=1)) == pytest.approx(0.5, abs=0.02)


def test_lost_racks_add_to_the_failures_and_need_a_tier_that_survives_them(usual: Simulated) -> None:
    racks = Fleet(16_384, LLAMA, rack_losses_per_1000_rack_days=4.0, swapped=0.0)
    found = simulate_goodput(racks, three_tiers(0.75), failures=2000)
    assert racks.mttf == pytest.approx(86_400 / (2048 * LLAMA.per_1000_node_days / 1000 + 512 * 0.004))
    assert found.rack_losses / found.failures == pytest.approx(512 * 4 / (512 * 4 + 2048 * 3.789), rel=0.15)
    # A rack's loss is served by the memory of a peer, which the shares of the formula then contain.
    extra = found.rack_losses / found.failures
    shares = [extra + (1 - extra) * 0.75, (1 - extra) * 0.225, (1 - extra) * 0.025]
    tiers = [Tier(t.name, t.interval, t.stall, t.load, share) for t, share in zip(THREE_TIERS, shares, strict=True)]
    assert found.ettr == pytest.approx(tiers_ettr(tiers, 120.0, racks.mttf), rel=0.01)
    near = [Tier("ssd", 1800.0, 2.0, 90.0, 1.0, survives_rack=False)]
    with pytest.raises(UserError, match="no tier survives that: ssd"):
        simulate_goodput(racks, near, failures=100)


def test_a_job_without_spares_waits_for_repairs_and_with_those_of_the_formula_hardly_ever() -> None:
    fleet = Fleet(16_384, LLAMA, spares=0, swapped=0.25, repair=24 * HOUR)
    none = simulate_goodput(fleet, three_tiers(0.75), failures=600)
    spares = spares_for(LLAMA, 16_384, fleet.repair, swapped=fleet.swapped)
    enough = simulate_goodput(replace(fleet, spares=spares.nodes), three_tiers(0.75), failures=600)
    assert none.times.waited > 0.1 * none.times.total
    assert none.waits > 100
    assert enough.waits <= 0.01 * enough.swaps
    assert enough.ettr > none.ettr + 0.1


def test_failures_that_strike_in_a_restart_begin_it_again() -> None:
    """A restart of R then takes M (exp(R / M) - 1) in the mean."""
    often, tier = failures_of_mttf(1.0, 1024), Tier("remote", 600.0, 5.0, 2400.0, 1.0)
    found = simulate_goodput(Fleet(1024, often, swapped=0.0, fails_in_restarts=True), [tier], 600.0, failures=3000)
    expected = 600 / (HOUR * exp(3000 / HOUR) * expm1(605 / HOUR))
    assert found.ettr == pytest.approx(expected, rel=0.03)
    assert expected < 0.85 * ettr(600.0, 5.0, 3000.0, HOUR)


def test_the_parts_of_the_time_add_up_and_the_same_seed_gives_the_same_job(usual: Simulated) -> None:
    fleet = Fleet(1024, failures_of(50.0), lemon_shape=0.5, spares=2, rack_losses_per_1000_rack_days=20.0)
    one, two, other = (simulate_goodput(fleet, failures=100, seed=seed) for seed in (3, 3, 4))
    assert one == two != other
    times = usual.times
    assert times.useful + times.stalls + times.lost + times.restarts + times.waited == times.total
    assert usual.times.total / usual.failures / HOUR == pytest.approx(3.09 + 170 / HOUR, rel=0.05)
    assert json.loads(json.dumps(usual.json()))["times"]["useful"] == times.useful
    assert f"ETTR = useful / all = {count(times.useful)} / {count(times.total)} = " in usual.explain()[-1]


def test_rates_are_published_ones_by_name_or_a_number() -> None:
    assert {name: round(rate.per_1000_node_days, 2) for name, rate in RATES.items()} == {
        "llama3": 3.79,
        "rsc1": 6.5,
        "rsc2": 2.34,
        "opt": 16.0,
        "bloom": 4.5,
    }
    assert sum(LLAMA_3_CAUSES.values()) == 419
    assert LLAMA.expected(16_384, 54) == pytest.approx({"all": 419, **LLAMA_3_CAUSES})
    assert failures_of(3).a_day(8000) == 3
    assert failures_of_mttf(3.0, 1024).mttf(2048) == pytest.approx(1.5 * HOUR)


def test_spares_are_the_99th_percentile_of_the_nodes_in_repair_and_a_rack() -> None:
    spares = spares_for(LLAMA, 16_384, 24 * HOUR)
    assert spares.in_repair == pytest.approx(7.76, abs=0.01)
    assert (spares.most_in_repair, spares.nodes, spares.gpus) == (15, 19, 152)
    assert spares_for(LLAMA, 16_384, 24 * HOUR, swapped=0.25).in_repair == pytest.approx(spares.in_repair / 4)
    assert spares.explain() == [
        "spare nodes = P99 of Poisson(nodes in repair) + a rack = P99 of Poisson(7.76) + 4 = 15 + 4 = 19"
    ]


@pytest.mark.parametrize("mean", [0.0, 0.01, 0.5, 7.76, 40.0])
def test_the_quantile_of_poisson_is_the_first_number_that_reaches_it(mean: float) -> None:
    below = [sum(exp(-mean) * mean**k / factorial(k) for k in range(upto + 1)) for upto in range(90)]
    assert poisson_quantile(mean, 0.99) == next(number for number, share in enumerate(below) if share >= 0.99)
    assert all(first <= second for first, second in pairwise(below))


def test_the_quantile_of_a_great_poisson_is_that_of_the_normal_one() -> None:
    assert poisson_quantile(1e8, 0.99) == pytest.approx(1e8 + 2.326 * 1e4, rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: failures_of("lama3"), "did you mean llama3"),
        (lambda: failures_of(-1), "failure rate is -1"),
        (lambda: failures_of_mttf(0, 8), "time between failures is 0"),
        (lambda: LLAMA.mttf(0), "GPUs is 0"),
        (lambda: spares_for(LLAMA, 8, -5), "repair time is -5"),
        (lambda: spares_for(LLAMA, 8, 5, swapped=25), "write 0.25 for 25 %"),
        (lambda: spares_for(LLAMA, 8, 5, rack_nodes=-1), "a rack of -1 nodes"),
        (lambda: poisson_quantile(3, 99), "a quantile of 99"),
        (lambda: ettr(0, 1, 1, 100), "interval between checkpoints is 0"),
        (lambda: ettr(10, -1, 1, 100), "stall of a checkpoint is -1"),
        (lambda: ettr(10, 1, 1, 0), "time between failures is 0"),
        (lambda: goodput(LLAMA, 8, []), "no checkpoint tier"),
        (lambda: goodput(LLAMA, 8, [Tier("a", 10.0, 20.0, 0.0, 1.0)]), "tier a stalls training for 20 s every 10 s"),
        (lambda: goodput(LLAMA, 8, [Tier("a", 10.0, 1.0, 0.0, 0.5)]), "shares of the failures are 0.5 = 0.5"),
        (
            lambda: goodput(LLAMA, 8, [Tier("a", 90.0, 1.0, 0.0, 0.5), Tier("b", 30.0, 1.0, 0.0, 0.5)]),
            "tier a is saved every 90 s and tier b, behind it, every 30 s",
        ),
        (lambda: one_tier(0.0, 10.0, 100.0), "no best interval"),
        (lambda: simulate_goodput(Fleet(100, LLAMA)), "100 GPUs are no whole number of nodes of 8; simulate 104"),
        (lambda: simulate_goodput(Fleet(0, LLAMA)), "GPUs is 0"),
        (lambda: simulate_goodput(Fleet(8, LLAMA, lemon_shape=0.0)), "shape of the nodes' rates is 0"),
        (lambda: simulate_goodput(Fleet(8, LLAMA, spares=-1)), "number of spares is -1"),
        (lambda: simulate_goodput(Fleet(8, LLAMA, excluded_after=0)), "a lemon is 0"),
        (lambda: simulate_goodput(Fleet(8, failures_of(0.0))), "nothing fails"),
        (lambda: simulate_goodput(Fleet(8, LLAMA), failures=3), "a simulation of 3 failures"),
    ],
)
def test_what_cannot_be_is_refused_with_the_number(wrong: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError) as raised:
        wrong()
    assert says in str(raised.value)
