"""The forecast of a run: its parts agree with each other, and each figure says where it comes from and how far off."""

from __future__ import annotations

import json
from dataclasses import replace
from math import expm1
from pathlib import Path

import pytest

from fivefold.config.models import preset_fields
from fivefold.config.run import (
    Batch,
    Checkpoint,
    Cluster,
    Data,
    Model,
    Parallel,
    Precision,
    Recompute,
    Run,
    Source,
)
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name
from fivefold.plan.basis import notes_above_peak
from fivefold.plan.figures import BASES
from fivefold.plan.forecast import Forecast
from fivefold.plan.forecast_table import time_rows
from fivefold.plan.goodput.failures import failures_of, spares_for
from fivefold.plan.goodput.lasting import spare_gpus
from fivefold.plan.memory.peak import memory
from fivefold.plan.page.scaling import scaling_table
from fivefold.plan.planned import plan
from fivefold.plan.published import accuracy
from fivefold.plan.time.step import step_time
from tests.plan.runs import SMALL, llama_405b, small_run
from tests.plan.test_ranks import MIXTURE

H100S = Cluster(gpu="h100", gpus=16384, price_per_gpu_hour=2.0)


def large(**changes: object) -> Run:
    """Llama 3 405B, which keeps too much unless it recomputes."""
    return llama_405b().model_copy(update={"cluster": H100S, "steps": 900_000, **changes})


@pytest.fixture(scope="module")
def tight() -> Forecast:
    return plan(large()).forecast()


def small(gpu: str = "h100", **more: object) -> Forecast:
    run = small_run(**({"dp": 4, "pp": 2} | more))  # type: ignore[arg-type]
    return plan(run.model_copy(update={"cluster": Cluster(gpu=gpu)})).forecast()


def test_time_and_memory_are_those_of_their_own_files(tight: Forecast) -> None:
    assert tight.figure("step_seconds").value == step_time(tight.run, tight.cluster).seconds
    alone = memory(tight.run, tight.cluster, tight.software)
    assert tight.figure("memory_allocated").value == alone.worst.allocated
    assert tight.memory.worst.pp == alone.worst.pp == 1, "not the first, which has a layer less"


def test_the_figures_agree_with_each_other(tight: Forecast) -> None:
    value = {figure.name: figure.value for figure in tight.figures}
    a_step = 2048 * 8192
    assert value["tokens_per_s"] == pytest.approx(a_step / value["step_seconds"])
    assert value["tokens_per_s_gpu"] == pytest.approx(value["tokens_per_s"] / 16384)
    assert value["tokens"] == 900_000 * a_step
    peak = tight.cluster.accelerator.peak_of("bf16")
    seconds = value["busy_days"] * 86400
    assert value["mfu"] == pytest.approx(value["flops"] / (seconds * 16384 * peak), rel=2e-3)
    assert value["calendar_days"] == pytest.approx(value["busy_days"] / value["ettr"])
    assert value["money"] == pytest.approx(2.0 * value["paid_gpu_hours"])
    spares = spares_for(failures_of("llama3"), 16384, repair_s=86_400, rack_nodes=0, swapped=0.25)
    assert value["spare_gpus"] == spares.gpus == 48
    assert value["busy_gpu_hours"] == pytest.approx(24 * 16384 * value["busy_days"])
    assert value["paid_gpu_hours"] == pytest.approx(24 * (16384 + 48) * value["calendar_days"])
    assert value["energy_kwh"] == pytest.approx(value["paid_gpu_hours"] * 0.7 * 1.2)
    assert sum(tight.step.parts.values()) == pytest.approx(value["step_seconds"])


def test_every_figure_says_what_it_rests_on_and_predictions_how_far_off_they_are(tight: Forecast) -> None:
    for figure in tight.figures:
        assert figure.basis in BASES
        assert " = " in figure.formula, figure.name
        assert figure.text in figure.formula, figure.name
    predicted = {figure.name for figure in tight.figures if figure.bar is not None}
    assert {"step_seconds", "tokens_per_s", "mfu", "calendar_days", "money", "memory_allocated"} <= predicted
    assert {"tokens", "parameters", "checkpoint_bytes", "memory_capacity"}.isdisjoint(predicted)


def test_the_interval_of_a_rate_is_that_of_its_time(tight: Forecast) -> None:
    slow, fast = tight.figure("step_seconds"), tight.figure("tokens_per_s")
    assert slow.interval is not None
    assert slow.value is not None
    low, high = slow.interval
    assert low == pytest.approx(slow.value / (1 + accuracy.STEP_TIME.p90))
    assert high == pytest.approx(slow.value / (1 - accuracy.STEP_TIME.p90))
    assert fast.interval == pytest.approx((2048 * 8192 / high, 2048 * 8192 / low))


def test_what_does_not_fit_says_so_with_the_numbers_and_what_would_make_it_fit(tight: Forecast) -> None:
    assert not tight.fits
    said = tight.too_much()
    assert said is not None
    assert said.startswith("does not fit: pipeline rank 1 is the fullest with ")
    assert "of 79.65 GiB" in said
    flags = [remedy.flags for remedy in tight.remedies]
    assert "--recompute.mode selective" in flags
    assert [each.step_seconds for each in tight.remedies] == sorted(each.step_seconds for each in tight.remedies)


def test_each_remedy_is_legal_and_fits(tight: Forecast, tmp_path: Path) -> None:
    for remedy in tight.remedies:
        words = remedy.flags.split()
        changes = dict(zip(words[::2], words[1::2], strict=True))
        run = tight.run
        for key, text in changes.items():
            section, name = key.removeprefix("--").split(".")
            value = int(text) if text.isdigit() else text
            changed = getattr(run, section).model_copy(update={name: value})
            run = run.model_copy(update={section: changed})
        found = plan(run).forecast()
        assert found.fits, remedy.flags
        assert found.step.seconds == remedy.step_seconds
        assert found.too_much() is None
        assert found.remedies == ()


def test_where_no_change_is_enough_that_is_said() -> None:
    run = small_run(dp=1).model_copy(
        update={
            "cluster": Cluster(gpu="l40s", gpus=1),
            "model": SMALL.model_copy(update={"hidden": 49152, "ffn": 131072, "head_dim": 4096}),
        }
    )
    said = plan(run).forecast().too_much()
    assert said is not None
    assert said.endswith("; no one or two changes of recompute, schedule, tp, cp, pp, ep, ZeRO and micro-batch mend it")


def test_fewer_and_more_gpus_take_longer_and_shorter_and_more_are_less_efficient(tight: Forecast) -> None:
    points = tight.scaling
    assert [point.gpus for point in points] == [4096, 8192, 16384, 32768, 65536]
    days = [point.calendar_days for point in points]
    assert days == sorted(days, reverse=True)
    shares = [point.efficiency for point in points]
    assert shares == sorted(shares, reverse=True)
    assert shares[2] == 1.0
    assert points[2].calendar_days == tight.figure("calendar_days").value
    assert (points[2].spare_gpus, points[2].paid_gpu_hours) == (48, tight.figure("paid_gpu_hours").value)
    assert points[2].step_seconds == tight.step.seconds


def test_a_number_of_gpus_that_cannot_be_says_why() -> None:
    points = small().scaling
    assert [point.gpus for point in points] == [2, 4, 8, 16, 32]
    assert all(point.why is None for point in points[:4])
    assert points[4].step_seconds is None
    assert "global_size" in str(points[4].why)


def test_machines_that_fail_more_often_make_it_longer() -> None:
    planned = plan(large())
    often, never = planned.forecast(failures=20.0), planned.forecast(failures=0.0)
    assert often.cost.calendar_days is not None
    assert never.cost.calendar_days is not None
    assert often.cost.calendar_days > 1.2 * never.cost.calendar_days
    assert often.cost.busy_days == never.cost.busy_days
    with pytest.raises(UserError, match="no failure rate is named"):
        planned.forecast(failures="meta")


BIG = Run(
    name="big",
    tokens=2e12,
    cluster=Cluster(gpu="h100", gpus=512, price_per_gpu_hour=2.5),
    model=Model.model_validate(preset_fields("llama-3-70b").value),
    data=Data(train=[Source(path="none")], seq_len=8192),  # type: ignore[arg-type]
    batch=Batch(global_size=512, micro_size=1),
    parallel=Parallel(tp=8, pp=4),
    recompute=Recompute(mode="selective"),
)
"""52 days of training, on machines of which one fails every four."""
OF_THE_END = ("ettr", "calendar_days", "paid_gpu_hours", "money", "energy_kwh")
"""Figures that failures decide."""


def saving(every: int | str | None, run: Run = BIG) -> Forecast:
    """The run with such checkpoints."""
    return plan(run.model_copy(update={"checkpoint": Checkpoint(every=every)})).forecast()


def test_the_longer_the_interval_the_more_failures_cost() -> None:
    shares = [saving(every).cost.ettr for every in ("30min", "5d", "20d", "100d", 1_000_000, "10000d", None, "never")]
    assert shares[:3] == pytest.approx([0.995, 0.512, 0.038], abs=1e-3)
    assert shares[3:] == pytest.approx([3.7e-5] * 5, rel=0.05), "the whole run is lost, and no more than that"


@pytest.mark.parametrize("every", ["100d", 1_000_000, None, "never"])
def test_a_run_that_failures_do_not_let_end_has_words_in_place_of_figures(every: int | str | None) -> None:
    """It was said to be never disturbed, and so to be the cheapest."""
    found = saving(every)
    told = json.loads(json.dumps(found.json(), allow_nan=False))
    for name in OF_THE_END:
        figure = told["figures"][name]
        assert (figure["value"], figure["error"], figure["basis"]) == (None, None, "assumed")
        assert figure["why"].startswith("a failure strikes every 4.12 days and costs all work since the start (")
    assert told["figures"]["busy_days"]["value"] == pytest.approx(52.5, abs=0.1)
    assert sum("would not end" in line for line in found.lines() if not line.startswith("assumption")) == 5
    assert any(
        sentence.startswith("the run would not end: a failure strikes every 4.12 days")
        and f"checkpoint.every = {every or 'null'} saves none of the 52.5 days" in sentence
        and sentence.endswith("give checkpoint.every 30min")
        for sentence in found.assumptions()
    )
    here = found.scaling[2]
    assert (here.calendar_days, here.paid_gpu_hours) == (None, None)
    assert str(here.why).startswith("would not end: a failure strikes every 4.12 days")
    assert "would not end" in scaling_table(found.scaling)


def test_a_run_shorter_than_its_interval_loses_itself_and_no_more() -> None:
    """50 steps of eight minutes in all, on machines of which one fails every three hours."""
    run = large(steps=50, recompute=Recompute(mode="selective"))
    first, second, none = (saving(every, run) for every in (1000, 100_000, None))
    busy, mttf, restart = first.step.seconds * 50, first.failures.mttf(16384), 720.0
    expected = busy / ((mttf + restart) * expm1(busy / mttf))
    assert none.cost.ettr == pytest.approx(expected, rel=1e-6)
    assert first.cost.ettr == second.cost.ettr == pytest.approx(expected, rel=1e-3)
    assert 0.91 < expected < 0.93


def test_what_failures_decide_is_assumed_and_spares_are_told(tight: Forecast) -> None:
    found = saving("30min")
    assert {found.figure(name).basis for name in OF_THE_END} == {"assumed"}
    assert found.figure("spare_gpus").value == found.json()["cost"]["spare_gpus"] == 8
    assert any("are paid for: 8" in sentence for sentence in found.assumptions())
    safe = plan(BIG).forecast(failures=0.0)
    assert safe.figure("spare_gpus").value == 0
    assert "nothing fails" in safe.assumptions()


def test_a_small_run_pays_for_no_spares_and_a_large_one_for_the_nodes_that_repair_takes() -> None:
    llama = failures_of("llama3")
    assert [spare_gpus(llama, gpus) for gpus in (1, 8, 64, 512, 2048, 16384)] == [0, 0, 0, 8, 16, 48]


def test_machines_that_fail_all_the_time_are_mended_by_no_checkpoints() -> None:
    found = plan(BIG).forecast(failures=1e6)
    assert any("no checkpoint.every mends it" in sentence for sentence in found.assumptions())


def test_the_mfu_names_the_format_and_the_peak_it_is_over() -> None:
    said = [
        next(
            sentence
            for sentence in plan(BIG.model_copy(update={"precision": each})).forecast().assumptions()
            if sentence.startswith("MFU")
        )
        for each in (Precision(), Precision(linear="fp8-block"))
    ]
    assert [each.rsplit(" over ")[1] for each in said] == [
        "the dense peak in bf16, 989 TFLOP/s",
        "the dense peak in fp8, 1,979 TFLOP/s",
    ]


def test_a_run_faster_than_the_peak_says_that_the_peak_is_wrong() -> None:
    run, own = small_run(dp=1), by_name("h100")
    low = replace(own, name="own", peak={"bf16": 1e12}, matmul={"bf16": 1e12})
    assert notes_above_peak(run, own, 1.0) == ()
    assert notes_above_peak(run, low, 1.698) == (
        "an MFU of 169.8%: the run is faster than the measured peak of own in bf16, 1 TFLOP/s; run `fivefold bench` "
        "again on an idle machine",
    )
    assert "correct peak_tflops" in notes_above_peak(run, own, 1.2)[0]


def test_nodes_that_are_not_filled_are_noted_and_counted_once() -> None:
    found = plan(BIG.model_copy(update={"cluster": Cluster(gpu="h100", gpus=512, gpus_per_node=7)})).forecast()
    said = "512 GPUs are 73.1 nodes of 7 (cluster.gpus_per_node), and tp 8 crosses nodes of 7"
    assert said in found.notes
    text = "\n".join(found.explain())
    assert "1,000 days / (512 / 8 x 3.789)" in text
    assert "(64 x" not in text
    assert saving("30min").notes == plan(BIG).notes


def test_experts_have_error_bars_of_their_own() -> None:
    found = plan(small_run(MIXTURE, dp=4, ep=4).model_copy(update={"cluster": Cluster(gpu="h100", gpus=4)})).forecast()
    assert found.figure("step_seconds").bar == accuracy.STEP_TIME_MOE
    assert found.figure("memory_allocated").bar is None
    assert any("equal loads" in sentence for sentence in found.assumptions())


def test_a_gpu_that_no_published_run_used_has_no_error_bar_and_is_assumed() -> None:
    found = small("mi300x")
    assert found.figure("step_seconds").bar is None
    assert found.figure("step_seconds").basis == "assumed"
    assert "as much of its datasheet as an H100" in found.assumptions()[0]


def test_a_gpu_that_was_measured_is_called_so(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(
        "name: own\nfamily: H100\npeak_tflops: {bf16: 989}\nmemory_gb: 80\nbandwidth_tb_s: 3.35\nlink_gb_s: 450\n"
        "domain: 8\nnic_gbit_s: 400\nwatts: 700\nmeasured: {copy_tb_s: 3.0}\n"
    )
    found = small(str(file))
    assert found.figure("step_seconds").basis == "measured"
    assert found.figure("memory_capacity").basis == "given"


def test_a_vocabulary_that_nothing_tells_is_asked_for() -> None:
    run = small_run(SMALL.model_copy(update={"vocab": "auto"}), dp=1)
    with pytest.raises(UserError, match=r"model\.vocab is auto .* give --model\.vocab N"):
        plan(run.model_copy(update={"cluster": Cluster(gpu="h100", gpus=1)})).forecast()


def test_the_gpu_of_this_machine_is_taken_where_the_driver_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_run(dp=4)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"give --gpu NAME \(cluster\.gpu\), one of .*H100-SXM-80GB"):
        plan(run).forecast()
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA H200\n")
    command.chmod(0o755)
    assert plan(run).forecast().cluster.accelerator.name == "H200-SXM-141GB"
    command.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(UserError, match="which GPU"):
        plan(run).forecast()


def test_explain_writes_every_figure_with_its_numbers(tight: Forecast) -> None:
    lines = tight.explain()
    text = "\n".join(lines)
    for figure in tight.figures:
        assert f"  {figure.formula}  [{figure.basis}" in text
    for section in (tight.memory.explanation(), tight.cost.explain(), tight.storage.explain(), tight.budget.explain()):
        for line in section:
            assert f"  {line}" in lines
    assert sum(line.startswith("  pipeline rank ") and line.count(" = ") == 2 for line in lines) == 16
    assert any(line.startswith("  each of stages 1 to 14, a microbatch: forward ") for line in lines)
    assert any("x 0.7" in line and line.startswith("  a large product = peak x share") for line in lines)


def test_the_parts_of_a_step_are_all_told_and_sum_to_it(tight: Forecast) -> None:
    for found in (tight, small(), small(zero=3), small(pp=1, zero=3), small(cp=2, tp=2)):
        told = [seconds for _, seconds, _ in time_rows(found)]
        assert sum(told) == pytest.approx(found.step.seconds)


def test_the_table_has_a_line_a_figure_and_a_pipeline_rank(tight: Forecast) -> None:
    lines = tight.lines()
    for figure in tight.figures:
        assert any(line.startswith(figure.title) and figure.text in line for line in lines)
    marked = [line for line in lines if line.endswith("fullest")]
    assert len(marked) == 1
    assert marked[0].split()[0] == "1"
    assert f"{tight.memory.worst.allocated / 2**30:.2f}" in marked[0]
    assert "does not fit" in lines
    fitting = small().lines()
    assert small().verdict() in fitting


def test_a_short_run_is_told_in_short_units() -> None:
    found = small()
    assert found.figure("calendar_days").text.endswith(" s")
    assert found.figure("energy_kwh").text.endswith(" kWh")
    assert found.figure("calendar_days").text in found.figure("calendar_days").formula


def test_products_in_fp64_are_taken_to_be_as_fast_as_in_fp32() -> None:
    run = small_run(dp=4).model_copy(update={"cluster": Cluster(gpu="h100"), "precision": Precision(compute="fp64")})
    found = plan(run).forecast()
    assert found.budget.peak == found.cluster.accelerator.peak_of("fp32")
    assert "products in fp64 are as fast as in fp32" in found.assumptions()
