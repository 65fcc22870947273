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
    events: Sequence[Mapping[str, Any]] = ({"kind": "started", "device": "NVIDIA H100 80GB HBM3"},),
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


def test_experts_are_as_hot_as_the_run_counted_them(tmp_path: Path) -> None:
    run = run_of(SPARSE, dp=8, ep=8)
    folder = trained(tmp_path / "run", run, 2.0)
    counts = [20, 20, *[1] * 14]
    line = {"step": STEPS, "counts": {str(layer): counts for layer in range(16)}}
    (folder / "experts.jsonl").write_text(json.dumps(line) + "\n", encoding="utf-8")
    found = predicted(run, folder)
    assert found.execution.hot_experts == pytest.approx(40 / (sum(counts) / 8))
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


def test_a_factor_far_from_one_is_warned_of(tmp_path: Path) -> None:
    run = run_of(dp=8)
    found = predicted(run, trained(tmp_path / "run", run, 3 * predicted(run).step.seconds))
    assert any("computation took" in note for note in found.json()["calibration"]["notes"])


H100 = {"kind": "started", "device": "NVIDIA H100 80GB HBM3"}


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
