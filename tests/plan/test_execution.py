"""`fivefold plan --software NAME`: a run as of another stack, through the command; among them the published anchors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fivefold.cli import commands
from fivefold.plan.execution import Execution
from fivefold.plan.software import STACKS

BLOOM = """\
name: bloom
steps: 1000
model: {preset: bloom-176b}
data: {train: [{path: none}], seq_len: 2048}
batch: {global_size: 2048, micro_size: 2}
parallel: {tp: 4, pp: 12, layers_per_stage: [5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5]}
recompute: {mode: full}
cluster: {gpu: a100, gpus: 384, nic_gbit_s: 50}
"""
LLAMA = f"""\
name: llama
tokens: 15.6e12
model: {{preset: llama-3-405b}}
data: {{train: [{{path: none}}], seq_len: 8192}}
batch: {{global_size: 2048, micro_size: 1}}
parallel: {{tp: 8, pp: 16, schedule: interleaved, chunks: 4, layers_per_stage: {[1, *[2] * 62, 1]}}}
cluster: {{gpu: h100, gpus: 16384}}
"""
DEEPSEEK = """\
name: deepseek
tokens: 14.8e12
model: {preset: deepseek-v3}
data: {train: [{path: none}], seq_len: 4096}
batch: {global_size: 15360, micro_size: 1}
parallel: {pp: 16, ep: 64, schedule: dualpipe-v, chunks: 2}
precision: {linear: fp8-block}
recompute: {mode: selective}
cluster: {gpu: h800, gpus: 2048, price_per_gpu_hour: 2}
"""
SMALL = """\
name: small
steps: 100
model: {layers: 8, hidden: 4096, heads: 32, ffn: 16384, vocab: 32000}
data: {train: [{path: none}], seq_len: 2048}
batch: {global_size: 32, micro_size: 1}
parallel: {tp: 2, pp: 2}
cluster: {gpu: h100, gpus: 8}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(run: str, *words: str) -> Result:
    Path("run.yaml").write_text(run)
    return CliRunner().invoke(commands, ["plan", "run.yaml", *words], prog_name="fivefold")


def told(run: str, *words: str) -> dict[str, Any]:
    return json.loads(call(run, "--json", *words).stdout)


def in_table(table: str, title: str) -> float:
    """The number behind a title."""
    line = next(line for line in table.splitlines() if line.startswith(title))
    number = line.removeprefix(title).split()[0].replace(",", "")
    return float(number[:-1]) * 1e6 if number.endswith("M") else float(number)


def figure(found: dict[str, Any], name: str) -> float:
    return float(found["figures"][name]["value"])


def test_bloom_takes_what_its_authors_measured_if_planned_with_the_software_of_its_time(folder: Path) -> None:
    found = told(BLOOM, "--software", "deepspeed-2022")
    assert figure(found, "step_seconds") == pytest.approx(104.7, rel=0.15)
    assert found["software"] == {"name": "deepspeed-2022", "generation": "unfused-2022"}
    assert figure(told(BLOOM), "step_seconds") < 0.85 * 104.7


@pytest.mark.parametrize(
    ("words", "tflops"),
    [
        ((), 400),
        (("--data.seq_len", "131072", "--batch.global_size", "128", "--parallel.cp", "16"), 380),
    ],
)
def test_llama_405b_reaches_what_its_authors_measured(folder: Path, words: tuple[str, ...], tflops: float) -> None:
    found = told(LLAMA, "--software", "megatron-2025", *words)
    assert figure(found, "mfu") * 989 == pytest.approx(tflops, rel=0.15)


def test_deepseek_v3_costs_the_gpu_hours_of_its_report(folder: Path) -> None:
    """2.664M H800-hours for 14.8T tokens, and 2.788M with 1,000 steps each of 32K and 128K and 5,000 hours after it."""
    stack = ("--software", "deepseek-2024")
    trained = call(DEEPSEEK, *stack)
    hours, paid = (in_table(trained.stdout, f"GPU-hours {what}") for what in ("of training", "to pay"))
    assert trained.exit_code == 0
    assert hours == pytest.approx(2.664e6, rel=0.15)
    assert in_table(trained.stdout, "money") == pytest.approx(2 * paid, rel=1e-3)
    longer = [
        call(DEEPSEEK, *stack, "--tokens", "null", "--steps", "1000", *words)
        for words in (
            ("--data.seq_len", "32768", "--batch.global_size", "1920", "--parallel.cp", "8"),
            ("--data.seq_len", "131072", "--batch.global_size", "480", "--parallel.cp", "32"),
        )
    ]
    assert [each.exit_code for each in longer] == [0, 0], "they fit"
    later = sum(in_table(each.stdout, "GPU-hours of training") for each in longer)
    assert hours + later + 5e3 == pytest.approx(2.788e6, rel=0.15)


def test_all_of_the_plan_goes_by_the_software(folder: Path) -> None:
    ours, theirs = told(SMALL), told(SMALL, "--software", "megatron-2022")
    for key in ("time", "memory", "cost", "scaling", "hot_experts"):
        assert (ours[key] == theirs[key]) == (key == "hot_experts"), key
    for each in (ours, theirs):
        here = next(point for point in each["scaling"] if point["gpus"] == 8)
        assert here["step_seconds"] == figure(each, "step_seconds")


def test_what_makes_it_fit_fits_by_that_software(folder: Path) -> None:
    big = SMALL.replace("layers: 8", "layers: 40").replace("hidden: 4096", "hidden: 8192")
    words = ("--software", "fsdp-2023")
    found = told(big, *words)
    assert not found["fits"]
    remedy = found["remedies"][0]
    changed = told(big, *words, *remedy["flags"].split())
    assert changed["fits"]
    assert figure(changed, "step_seconds") == remedy["step_seconds"]


def test_table_and_page_say_which_software_it_is_unless_it_is_this(folder: Path) -> None:
    words = "as of the software megatron-2025, not as this project would run it"
    result = call(SMALL, "--software", "megatron-2025", "--html", "plan.html")
    assert words in result.stdout.splitlines()
    assert words in Path("plan.html").read_text(encoding="utf-8")
    assert "assumption: software: megatron-2025, kernels of generation engine-2025, 18 bytes of state" in result.stdout
    assert call(SMALL, "--software", "fivefold").stdout == call(SMALL).stdout
    assert words not in call(SMALL).stdout


def test_the_search_goes_by_the_software(folder: Path) -> None:
    run = SMALL.replace("gpus: 8", "gpus: 2").replace("tp: 2, pp: 2", "tp: 2")
    words = ("--search", "--software", "megatron-2022")
    found = told(run, *words)
    assert found["software"]["name"] == "megatron-2022"
    best = found["best"][0]
    layout = best["parallel"] | {"layers_per_stage": "auto", "schedule_memory": "null"}
    flags = [word for key, value in layout.items() for word in (f"--parallel.{key}", str(value))]
    flags += ["--batch.micro_size", str(best["micro_size"]), "--recompute.mode", best["recompute"]["mode"]]
    assert figure(told(run, *words[1:], *flags), "step_seconds") == pytest.approx(best["step_seconds"])
    plain = call(run, "--search").stdout
    assert f"{best['step_seconds']:.4g}" not in plain
    assert "as of the software" not in plain
    assert "as of the software megatron-2022, not as this project would run it" in call(run, *words).stdout


def test_every_stack_can_be_asked_for_and_another_is_refused_with_near_names(folder: Path) -> None:
    for name in STACKS:
        assert told(SMALL, "--software", name)["software"]["name"] == name
    result = call(SMALL, "--software", "megatron 2026")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no software called megatron 2026; did you mean megatron-2026?" in result.stderr
    result = call(SMALL, "--software", "megatron-2025", "--ranks")
    assert result.exit_code == 2
    assert "give them without --ranks and --build-rank" in result.stderr


def test_an_execution_of_a_layout_is_its_software() -> None:
    assert Execution("megatron-2025").software_of(1, 2, 1) is STACKS["megatron-2025"]
    assert Execution().software_of(3, 1, 1).reduces_each_microbatch
    assert not Execution().software_of(3, 2, 1).reduces_each_microbatch
