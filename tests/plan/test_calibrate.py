"""A finished run corrects a plan: the residual by term, the factors that follow, and what they change elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fivefold import train
from fivefold.cli import commands
from fivefold.config.files import dump_run
from fivefold.config.run import Batch, Experts, Model, Run, Validate
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name, is_driven_as
from fivefold.hardware.entry import accelerator_of
from fivefold.pipeline.measured import PIPELINE_FILE, Measured
from fivefold.pipeline.of_run import schedule_of_run
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.text import to_csv
from fivefold.pipeline.times import Times
from fivefold.plan.calibration.factors import COMPUTATION, ESTIMATED, microbatch_seconds
from fivefold.plan.execution import execution_of
from fivefold.plan.forecast import Forecast
from fivefold.plan.memory.peak import GIB
from fivefold.plan.planned import plan
from tests.plan.runs import small_run
from tests.train.conftest import trainer_in

MODEL = Model(layers=16, hidden=2048, heads=16, kv_heads=8, ffn=8192, vocab=32000)
SPARSE = MODEL.model_copy(update={"moe": Experts(experts=16, top_k=2, ffn=2048)})
STEPS = 40
H100 = {"kind": "started", "device": "NVIDIA H100 80GB HBM3"}


def run_of(model: Model = MODEL, gpus: int = 8, gpu: str = "h100", **parallel: Any) -> Run:
    """A run whose sequences are long enough that its operations are large."""
    run = small_run(model, gpus, 2048, **parallel)
    cluster = run.cluster.model_copy(update={"gpu": gpu})
    return run.model_copy(update={"batch": Batch(global_size=64, micro_size=1), "cluster": cluster})


def predicted(run: Run, calibrate: Path | None = None) -> Forecast:
    """What is said of a run, by itself or corrected."""
    planned = plan(run)
    return planned.forecast(
        execution=execution_of(planned.run, calibrate=None if calibrate is None else str(calibrate))
    )


def trained(
    folder: Path,
    run: Run,
    step_s: float | Callable[[int], float],
    gib: float = 40.0,
    events: Sequence[Mapping[str, Any]] = (H100,),
    steps: int = STEPS,
    **more: float,
) -> Path:
    """The folder of a run that took so long for each step."""
    folder.mkdir(parents=True)
    resolved = plan(run).run
    (folder / "run.yaml").write_text(dump_run(resolved), encoding="utf-8")
    seconds = step_s if callable(step_s) else lambda step: step_s
    lines = [
        {"step": step, "loss": 2.0, "step_s": seconds(step), "mem_peak_gib": gib, "mfu": None, **more}
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    (folder / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events), encoding="utf-8")
    return folder


def taking(parts: Mapping[str, float], computation: float, **own: float) -> float:
    """Seconds of a step whose parts take so many times as long as predicted, idle time with what ranks wait for."""
    factors = {name: own.get(name, computation if name in COMPUTATION else 1.0) for name in parts}
    now = {name: seconds * factors[name] for name, seconds in parts.items() if name != "bubble"}
    return sum(now.values()) + parts["bubble"] * microbatch_seconds(now) / microbatch_seconds(parts)


def factors(found: Forecast) -> dict[str, float]:
    """All that a calibration found."""
    return {name: factor["value"] for name, factor in found.json()["calibration"]["factors"].items()}


@pytest.mark.parametrize("layout", [{"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 2, "pp": 4}, {"dp": 4, "pp": 2, "zero": 1}])
def test_computation_takes_what_the_parts_that_are_known_leave_of_the_step(tmp_path: Path, layout: dict) -> None:
    run = run_of(**layout)
    before = predicted(run)
    update = 2.0 * before.step.parts["optimizer"]
    seconds = taking(before.step.parts, 1.25, optimizer=2.0)
    found = predicted(run, trained(tmp_path / "run", run, seconds, update_s=update))
    assert factors(found) | {"memory": 0} == pytest.approx({"computation": 1.25, "optimizer": 2.0, "memory": 0})
    assert found.step.seconds == pytest.approx(seconds)
    assert sum(found.step.parts.values()) == pytest.approx(seconds)
    assert found.step.parts["products"] == pytest.approx(1.25 * before.step.parts["products"])
    assert found.step.mfu == pytest.approx(before.step.mfu * before.step.seconds / seconds)


def test_the_residual_is_told_by_term_and_what_was_not_measured_stays_predicted(tmp_path: Path) -> None:
    run = run_of(dp=4, tp=2)
    before = predicted(run)
    folder = trained(tmp_path / "run", run, 1.5 * before.step.seconds, update_s=3 * before.step.parts["optimizer"])
    told = predicted(run, folder).json()["calibration"]
    terms = {term["name"]: term for term in told["terms"]}
    ratios = {name: term["ratio"] for name, term in terms.items() if term["ratio"] is not None}
    memory = 40 * GIB / before.memory.worst.allocated
    assert ratios == pytest.approx(
        {"step_seconds": 1.5, "tokens_per_s": 1 / 1.5, "optimizer": 3.0, "memory_allocated": memory}
    )
    assert {name for name in before.step.parts if before.step.parts[name]} <= set(terms)
    assert terms["products"]["predicted"] == before.step.parts["products"]
    assert "does not time single operations" in terms["products"]["remark"]
    assert "does not time it apart" in terms["tp"]["remark"]
    assert any("tp, reduction not measured apart" in note for note in told["notes"])


def test_of_the_run_itself_a_plan_says_what_was_measured_and_of_another_what_follows(tmp_path: Path) -> None:
    run = run_of(dp=8)
    before = predicted(run)
    folder = trained(tmp_path / "run", run, taking(before.step.parts, 1.2))
    same, other = predicted(run, folder), predicted(run_of(dp=16, gpus=16), folder)
    measured = ("step_seconds", "tokens_per_s", "mfu", "busy_days", "memory_allocated")
    assert {same.figure(name).basis for name in measured} == {"measured"}
    assert {other.figure(name).basis for name in measured} == {"calibrated on small"}
    for name in ("exposed", "bubble", "memory_reserved"):  # of which no run says anything by itself
        assert {found.figure(name).basis for found in (same, other)} == {"calibrated on small"}
    assert all(each.figure("step_seconds").bar is None for each in (same, other))
    assert predicted(run).figure("step_seconds").bar is not None
    plain = predicted(run_of(dp=16, gpus=16))
    assert other.step.seconds == pytest.approx(taking(plain.step.parts, 1.2))
    assert "calibrated on small: by the planner's formulas, times the factors of that run" in other.lines()
    points = {point.gpus: point.step_seconds for point in same.scaling}
    assert points[16] == pytest.approx(other.step.seconds)


@pytest.mark.parametrize("every", [None, 100])
def test_what_rests_on_failures_is_assumed_whatever_a_run_measured(tmp_path: Path, every: int | None) -> None:
    run = run_of(dp=8)
    run = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"every": every})})
    found = predicted(run, trained(tmp_path / "run", run, 2.0))
    resting = ("ettr", "calendar_days", "paid_gpu_hours")
    assert {found.figure(name).basis for name in resting} == {"assumed"}
    assert found.figure("busy_gpu_hours").basis == "measured"


def test_medians_are_of_steady_steps_of_the_newest_start(tmp_path: Path) -> None:
    """Compiling, validations and checkpoints take their own time, and an earlier start had another layout."""
    run = run_of(dp=8).model_copy(update={"checkpoint": run_of(dp=8).checkpoint.model_copy(update={"every": 4})})
    wanted = 2 * predicted(run).step.seconds

    def seconds(step: int) -> float:
        return wanted if step > 15 and step % 4 != 1 else 9.0

    events = [{"kind": "started", "device": "CPU"}, {"kind": "resumed", "device": "NVIDIA H100 80GB HBM3", "step": 10}]
    folder = trained(tmp_path / "run", run, seconds, events=events)
    found = predicted(run, folder)
    assert found.step.seconds == pytest.approx(wanted)
    assert found.json()["calibration"]["steps"] == {"first": 16, "last": 40, "steady": 19, "trained": 30}


def test_an_exchange_has_a_factor_of_its_own_and_keeps_it_on_the_same_links(tmp_path: Path) -> None:
    run = run_of(SPARSE, dp=8, ep=8)
    before = predicted(run).step.parts
    folder = trained(
        tmp_path / "run",
        run,
        taking(before, 1.1, ep=3.0, optimizer=1.0),
        moe_exchange_s=3.0 * before["ep"],
        update_s=before["optimizer"],
    )
    found = predicted(run, folder)
    assert factors(found) | {"memory": 0} == pytest.approx(
        {"computation": 1.1, "ep": 3.0, "optimizer": 1.0, "memory": 0}
    )
    longer = run_of(SPARSE, gpus=16, dp=16, ep=8)
    assert predicted(longer, folder).step.parts["ep"] == pytest.approx(3.0 * predicted(longer).step.parts["ep"])
    between = run_of(SPARSE, gpus=16, dp=16, ep=16)
    assert predicted(between, folder).step.parts["ep"] == predicted(between).step.parts["ep"]
    left_out = "ep stays as predicted in the plan: its ranks are joined otherwise than those of small"
    for plan_of, is_left_out in ((run, False), (longer, False), (between, True)):
        notes = predicted(plan_of, folder).json()["calibration"]["notes"]
        assert any(left_out in note for note in notes) is is_left_out
    assert "ep x 3.000 between ranks that are joined alike" in "\n".join(found.lines())


def test_experts_are_as_hot_as_the_run_counted_them(tmp_path: Path) -> None:
    run = run_of(SPARSE, dp=8, ep=8)
    folder = trained(tmp_path / "run", run, 2.0)
    (folder / "experts.jsonl").write_text(f"{counted()}\n", encoding="utf-8")
    found = predicted(run, folder)
    assert found.execution.hot_experts == pytest.approx(40 / (54 / 8))
    assert found.step.seconds == pytest.approx(2.0)
    assert found.figure("step_seconds").basis == "measured"


def test_a_pipeline_that_was_measured_action_by_action_is_compared_by_passes(tmp_path: Path) -> None:
    run = run_of(dp=2, pp=4)
    before = predicted(run)
    schedule = schedule_of_run(plan(run).run)
    assert schedule is not None
    sent = before.step.parts["transfer"] / before.microbatches
    stages = [(f - sent / 2, i - sent / 2, w) for f, i, w in before.step.stages]
    forward, input_, weight = (tuple(2 * stage[kind] for stage in stages) for kind in range(3))
    timeline = simulate(schedule, Times(forward, input_, weight))
    spans = [[(str(action), start, end) for action, start, end in rank] for rank in timeline.spans]
    folder = trained(tmp_path / "run", run, 1.0)
    record = Measured(to_csv(schedule), schedule.name, 30, spans, 5 * before.step.hop, 2048)
    record.save(folder / PIPELINE_FILE)
    terms = {term["name"]: term for term in predicted(run, folder).json()["calibration"]["terms"]}
    assert terms["forward"]["ratio"] == pytest.approx(2)
    both = [terms[f"gradients_of_{each}"] for each in ("inputs", "weights")]
    assert sum(term["measured"] for term in both) == pytest.approx(2 * sum(term["predicted"] for term in both))
    assert terms["hop"]["ratio"] == pytest.approx(5)
    assert terms["idle"]["measured"] == pytest.approx(1 - max(timeline.busy) / timeline.makespan)
    assert terms["idle"]["ratio"] == pytest.approx(1, rel=0.1)
    assert factors(predicted(run, folder))["transfer"] == pytest.approx(5)


@pytest.mark.parametrize("layout", [{"dp": 8}, {"dp": 2, "pp": 4}])
def test_of_memory_what_is_estimated_has_a_factor_and_what_is_counted_stays(tmp_path: Path, layout: dict) -> None:
    run = run_of(**layout)
    before = predicted(run).memory
    folder = trained(tmp_path / "run", run, 1.0, gib=1.3 * before.worst.allocated / GIB)
    found = predicted(run, folder)
    assert found.memory.worst.allocated == pytest.approx(1.3 * before.worst.allocated)
    factor = factors(found)["memory"]
    assert factor > 1.3
    other = run_of(dp=8).model_copy(update={"batch": Batch(global_size=64, micro_size=2)})
    was, now = predicted(other).memory.worst.parts, predicted(other, folder).memory.worst.parts
    for name, size in was.items():
        assert now[name] == pytest.approx(size * (factor if name in ESTIMATED else 1.0))


def test_memory_that_cannot_be_is_not_calibrated_with(tmp_path: Path) -> None:
    run = run_of(dp=8)
    found = predicted(run, trained(tmp_path / "run", run, 1.0, gib=1.0))
    assert "memory" not in factors(found)
    assert any("the 1.000 GiB measured are less than the" in note for note in found.json()["calibration"]["notes"])
    assert found.figure("memory_allocated").basis == "calibrated"


def test_a_step_that_leaves_nothing_for_computation_corrects_no_time(tmp_path: Path) -> None:
    run = run_of(dp=8)
    before = predicted(run)
    found = predicted(run, trained(tmp_path / "run", run, 1e-3, update_s=2e-3))
    assert found.step.seconds == before.step.seconds
    assert any("leaves nothing for computation" in note for note in found.json()["calibration"]["notes"])
    assert found.figure("step_seconds").basis == "calibrated"
    assert found.figure("step_seconds").bar is not None


@pytest.mark.parametrize(("part", "field"), [("optimizer", "update_s"), ("ep", "moe_exchange_s")])
def test_what_takes_longer_than_the_whole_step_gives_no_factor_at_all(tmp_path: Path, part: str, field: str) -> None:
    """Factors of thousands were listed, and none was applied."""
    run = run_of(SPARSE, dp=8, ep=8)
    before = predicted(run)
    folder = trained(tmp_path / "run", run, before.step.seconds, gib=1.0, **{field: 100.0})
    found = predicted(run, folder)
    assert factors(found) == {}
    assert found.step == before.step
    told = found.json()["calibration"]
    assert next(term["measured"] for term in told["terms"] if term["name"] == part) == 100.0
    assert any("leaves nothing for computation" in note for note in told["notes"])
    table = "\n".join(found.lines())
    assert "factor of" not in table
    assert "calibrated on small: nothing could be told" in table
    assert "small gives no factor, so all is as predicted" in table


@pytest.mark.parametrize(
    "lines",
    [
        ['{"step": 41, "step_s": "x"}', '{"step": "x", "step_s": 1}', '{"step_s": 1}', '{"step": true, "step_s": 1}'],
        ['{"step": 41, "step_s": -1}', '{"step": 41, "step_s": NaN}', '{"step": -3, "step_s": 1}'],
        ['{"step": 41, "step_s": 1' + 400 * "0" + "}", '{"step": 41, "step_s": 1e-320}', '{"step": 41, "step_s": []}'],
        ["[", "[1]", "7", "null", '"x"', "{}", "[" * 100_000, "\x00"],
    ],
)
def test_damaged_lines_of_metrics_and_events_and_counts_change_nothing(tmp_path: Path, lines: list[str]) -> None:
    run = run_of(SPARSE, dp=8, ep=8)
    folder = trained(tmp_path / "run", run, 2.0, update_s=0.01, moe_exchange_s=0.1)
    (folder / "experts.jsonl").write_text(f"{counted()}\n", encoding="utf-8")
    before = predicted(run, folder).json()
    for file in ("metrics.jsonl", "events.jsonl", "experts.jsonl"):
        with (folder / file).open("a", encoding="utf-8") as more:
            more.writelines(f"{line}\n" for line in lines)
    assert predicted(run, folder).json() == before


@pytest.mark.parametrize("step", ["x", [], {}, -1, 2.5, True])
def test_a_start_whose_step_is_none_is_left_out(tmp_path: Path, step: object) -> None:
    run = run_of(dp=8)
    events = [H100, {"kind": "resumed", "step": step, "device": "CPU"}, {"kind": []}, {"kind": None, "step": "x"}]
    found = predicted(run, trained(tmp_path / "run", run, 2.0, events=events)).json()["calibration"]
    assert (found["device"], found["steps"]["trained"]) == (H100["device"], STEPS)


ODD = (None, "", "x", [], {}, True, 0, -1, 2.5, 1e30, float("nan"), 10**400)


def test_no_odd_value_in_the_files_of_a_run_is_more_than_one_message(tmp_path: Path) -> None:
    run = run_of(SPARSE, dp=4, ep=4, pp=2)
    folder = trained(tmp_path / "run", run, 2.0, update_s=0.01, moe_exchange_s=0.1)
    (folder / "experts.jsonl").write_text(f"{counted()}\n", encoding="utf-8")
    schedule = schedule_of_run(plan(run).run)
    assert schedule is not None
    times = Times(*((1.0, 1.0),) * 3)
    spans = [[(str(action), start, end) for action, start, end in rank] for rank in simulate(schedule, times).spans]
    Measured(to_csv(schedule), schedule.name, 30, spans, 1e-3, 2048).save(folder / PIPELINE_FILE)
    assert said(run, folder) == ""
    for file in ("metrics.jsonl", "events.jsonl", "experts.jsonl", PIPELINE_FILE):
        text = (folder / file).read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        for key in lines[0]:
            for value in ODD:
                changed = [{**line, key: value} for line in lines]
                (folder / file).write_text("".join(f"{json.dumps(line)}\n" for line in changed), encoding="utf-8")
                assert len(said(run, folder).splitlines()) <= 1, (file, key, value)
        for content in (b"", b"\xff\xfe", b"[", b"null", b"[" * 100_000, b"{}", b'{"step": 1}'):
            (folder / file).write_bytes(content)
            assert len(said(run, folder).splitlines()) <= 1, (file, content[:20])
        (folder / file).unlink()
        (folder / file).mkdir()
        assert len(said(run, folder).splitlines()) <= 1, file
        (folder / file).rmdir()
        (folder / file).write_text(text, encoding="utf-8")


def said(run: Run, folder: Path) -> str:
    """The message of a run that cannot be calibrated with; none of one that can."""
    try:
        found = predicted(run, folder)
    except UserError as error:
        return str(error)
    json.dumps(found.json(), allow_nan=False)
    assert found.lines()
    return ""


def counted() -> str:
    """A line of what a run of `SPARSE` counted."""
    return json.dumps({"step": STEPS, "counts": {str(layer): [20, 20, *[1] * 14] for layer in range(16)}})


def test_a_factor_far_from_one_is_warned_of(tmp_path: Path) -> None:
    run = run_of(dp=8)
    found = predicted(run, trained(tmp_path / "run", run, 3 * predicted(run).step.seconds))
    assert any("computation took" in note for note in found.json()["calibration"]["notes"])


@pytest.mark.parametrize(
    ("events", "gpu", "steps", "says"),
    [
        ([H100], "h100", 0, "has no step yet"),
        ([H100], "h100", 12, "has 7 steady steps, and 10 are needed: its newest start trained 12"),
        ([H100, {"kind": "resumed", "step": 40, "device": "CPU"}], "h100", 40, "has no step yet that its newest start"),
        ([H100], "a100", 40, "ran on NVIDIA H100 80GB HBM3, and the plan is for A100-SXM-80GB"),
        (
            [{"kind": "started", "device": "NVIDIA H100 PCIe"}],
            "h100",
            40,
            "ran on NVIDIA H100 PCIe, and the plan is for",
        ),
        ([{"kind": "started", "device": "CPU"}], "h100", 40, "ran on a CPU, whose speed says nothing of H100-SXM-80GB"),
        ([], "auto", 40, "says what it ran on"),
    ],
)
def test_what_cannot_be_calibrated_with_is_one_message(
    tmp_path: Path, events: list, gpu: str, steps: int, says: str
) -> None:
    run = run_of(dp=8, gpu=gpu).model_copy(update={"validation": Validate(every=None)})
    folder = trained(tmp_path / "run", run, 1.0, events=events, steps=steps)
    asked = run if gpu != "auto" else run_of(dp=8)
    with pytest.raises(UserError, match=says) as caught:
        predicted(asked, folder)
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_no_run_and_what_does_not_go_together_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump_run(run_of(dp=8)), encoding="utf-8")
    for words, says in (
        (["--calibrate", "gone"], "--calibrate gone is no run"),
        (["--calibrate", "gone", "--search"], "give it without --ranks, --build-rank, --search"),
        (["--calibrate", "gone", "--software", "megatron-2025"], "says nothing of megatron-2025"),
    ):
        result = CliRunner().invoke(commands, ["plan", str(tmp_path / "run.yaml"), *words])
        assert result.exit_code == 2
        assert says in result.output


def test_a_plan_that_names_no_gpu_is_for_the_one_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.plan.calibration.calibrate.local_accelerator", lambda: None)
    monkeypatch.setattr("fivefold.plan.forecast.local_accelerator", lambda: None)
    folder = trained(tmp_path / "run", run_of(dp=8), 1.0)
    assert predicted(run_of(dp=8, gpu="auto"), folder).cluster.accelerator.name == "H100-SXM-80GB"


def test_a_file_of_the_users_own_goes_by_the_drivers_names_in_it() -> None:
    entry = {"name": "own", "driver_names": ["H200*"], "peak_tflops": {"bf16": 900}, "memory_gb": 141}
    own = accelerator_of(entry | {"bandwidth_tb_s": 4.8})
    assert [is_driven_as(own, name) for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")] == [True, False]
    assert is_driven_as(by_name("h200"), "NVIDIA H200")
    assert not is_driven_as(by_name("h100"), "NVIDIA H200")


CPU_FILE = """
name: own-cpu
family: CPU
matmul_tflops: {fp32: 0.04}
memory_gb: 16
bandwidth_tb_s: 0.01
"""


def test_a_short_run_on_a_cpu_corrects_its_own_plan(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path)
    train(Run.load(trainer.file, ["--steps", "18", "--validate.every", "null", "--checkpoint.every", "null"]))
    (tmp_path / "cpu.yaml").write_text(CPU_FILE, encoding="utf-8")
    words = ["plan", str(trainer.file), "--gpu", str(tmp_path / "cpu.yaml"), "--gpus", "1"]
    result = CliRunner().invoke(commands, [*words, "--calibrate", str(trainer.out / "small"), "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    found = told["calibration"]
    assert (found["device"], found["steps"]["steady"]) == ("CPU", 13)
    seconds = sorted(line["step_s"] for line in trainer.metrics() if line["step"] > 5)
    assert told["figures"]["step_seconds"] | {"value": 0} == {
        "value": 0, "unit": "s", "basis": "measured", "error": None, "low": None, "high": None,
    }  # fmt: skip
    assert told["figures"]["step_seconds"]["value"] == pytest.approx(seconds[6])
    assert set(found["factors"]) == {"computation", "optimizer"}
    memory = next(term for term in found["terms"] if term["name"] == "memory_allocated")
    assert (memory["measured"], memory["remark"][:12]) == (None, "not measured")
    table = CliRunner().invoke(commands, [*words, "--calibrate", str(trainer.out / "small")]).stdout
    assert "factor of computation = (measured step" in table
