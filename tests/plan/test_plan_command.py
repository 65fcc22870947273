"""`fivefold plan RUN.YAML`: a table or JSON in under a second, and one message for each thing that cannot be."""

from __future__ import annotations

import json
import re
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fivefold import Run, plan
from fivefold.cli import commands
from fivefold.config.files import ConfigError

LARGE = """\
name: large
tokens: 15.6e12
model: {preset: llama-3-405b}
data: {train: [{path: data/a}], seq_len: 8192}
batch: {global_size: 2048, micro_size: 1}
parallel: {tp: 8, pp: 16}
recompute: {mode: selective}
"""
ON = ("--gpu", "h100", "--gpus", "16384")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with run.yaml; no driver is found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "run.yaml").write_text(LARGE)
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(commands, ["plan", "run.yaml", *words], prog_name="fivefold")


def told(*words: str) -> dict[str, Any]:
    return json.loads(call("--json", *words).stdout)


def test_the_largest_run_is_planned_in_under_a_second(folder: Path) -> None:
    """Time of the processor, for other tests run beside this one: the start of a process, most of it, may double."""
    took = []
    for _ in range(3):
        began = time.process_time()
        assert call(*ON).exit_code == 0
        took.append(time.process_time() - began)
    assert min(took) < 0.4
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "fivefold", "plan", "run.yaml", *ON], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


def test_the_table_and_the_json_say_the_same(folder: Path) -> None:
    table = call(*ON)
    assert (table.exit_code, table.stderr) == (0, "")
    assert table.stdout.startswith("run large on 16,384 H100-SXM-80GB = pp 16 x dp 128 x cp 1 x tp 8, ZeRO 1, 1f1b, ")
    found = told(*ON)
    step, worst = found["figures"]["step_seconds"], found["memory"]["ranks"][found["memory"]["worst"]]
    assert f"{step['value']:.3g} s" in table.stdout
    assert f"{worst['allocated'] / 2**30:.2f}" in table.stdout
    assert step["low"] < step["value"] < step["high"]
    assert found["figures"]["tokens_per_s_gpu"]["value"] == pytest.approx(2048 * 8192 / step["value"] / 16384)


SCHEMA = {
    "schema": None,
    "run": {
        *("name", "model", "vocabulary", "layout", "recompute", "offload", "microbatches", "micro_size", "global_size"),
        "seq_len",
    },
    "cluster": {"accelerator", "gpus", "gpus_per_node", "nodes", "confidence"},
    "software": {"name", "generation"},
    "hot_experts": None,
    "calibration": None,
    "fits": None,
    "tight": None,
    "figures": {
        *("step_seconds", "tokens_per_s", "tokens_per_s_gpu", "mfu", "bubble", "communication", "exposed"),
        *("memory_allocated", "memory_reserved", "memory_nvidia_smi", "memory_capacity"),
        *("parameters", "tokens", "flops", "busy_days", "ettr", "calendar_days", "busy_gpu_hours", "paid_gpu_hours"),
        *(
            "spare_gpus",
            "energy_kwh",
            "checkpoint_bytes",
            "checkpoint_bytes_kept",
            "token_file_bytes",
            "loader_bytes_per_s",
        ),
    },
    "time": {"parts", "stages", "hop"},
    "memory": None,
    "budget": None,
    "cost": None,
    "storage": None,
    "scaling": None,
    "remedies": None,
    "assumptions": None,
    "notes": None,
}


def test_the_json_has_the_documented_keys_and_money_only_with_a_price(folder: Path) -> None:
    found = told(*ON)
    assert list(found) == list(SCHEMA)
    for key, inner in SCHEMA.items():
        if inner is not None:
            assert set(found[key]) == inner
    assert found["schema"] == 1
    for figure in found["figures"].values():
        assert set(figure) == {"value", "unit", "basis", "error", "low", "high"}
    assert told(*ON, "--cluster.price_per_gpu_hour", "2.5")["figures"]["money"]["value"] == pytest.approx(
        2.5 * found["figures"]["paid_gpu_hours"]["value"]
    )
    docs = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    for name in (*SCHEMA, *found["figures"], "money"):
        assert f"`{name}`" in docs, name


def test_the_plans_of_the_readme_come_out_of_the_file_that_init_writes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of that file was no multiple of its micro-batch x dp 8."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^fivefold (plan .*)", readme, flags=re.MULTILINE)
    assert len(lines) == 3
    (folder / "mine.yaml").write_text(CliRunner().invoke(commands, ["init"]).stdout)
    (folder / "data" / "stdlib").mkdir(parents=True)
    (folder / "data" / "stdlib" / "dataset.json").write_text('{"vocab": 8192}')
    for line in lines:
        result = CliRunner().invoke(commands, shlex.split(line, comments=True), prog_name="fivefold")
        assert result.exit_code == 0, result.output
    assert all((folder / name).is_file() for name in ("plan.html", "best.yaml"))
    for gpus in ("1", "2", "4", "8"):
        result = CliRunner().invoke(commands, ["plan", "mine.yaml", "--gpu", "h100", "--gpus", gpus])
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("words", "starts"),
    [
        ([], ["how many ranks", "which GPU", "how large the model is"]),
        (["--gpus", "3"], ["batch.global_size = 2048 is no multiple", "which GPU", "how large the model is"]),
        (["--forward"], ["how many ranks", "which GPU", "how large the model is"]),
        (["--search"], ["how many GPUs", "which GPU", "how large the model is"]),
        (
            ["--parallel.tp", "3"],
            ["model.heads = 128 cannot", "8 key/value", "model.ffn", "a microbatch of", "how many"],
        ),
    ],
)
def test_all_that_is_wrong_or_not_known_is_said_at_once(folder: Path, words: list[str], starts: list[str]) -> None:
    """They were asked for one after the other."""
    result = call("--model.vocab", "auto", "--parallel.pp", "1", "--parallel.tp", "1", *words)
    assert result.exit_code == 2
    told = [line.removeprefix("  - ") for line in result.stderr.splitlines()[1:]]
    for start in starts:
        assert sum(line.startswith(start) for line in told) == 1, start
    if len(starts) == 3:
        assert len(told) == 3


def test_a_plan_from_python_asks_at_once_for_what_it_lacks(folder: Path) -> None:
    run = Run.load(folder / "run.yaml", ["--model.vocab", "auto", "--gpus", "128"])
    with pytest.raises(ConfigError) as raised:
        plan(run).forecast()
    assert [problem.split(";")[0] for problem in raised.value.problems] == [
        "which GPU the plan is for is not known",
        "how large the model is is not known: model.vocab is auto and its data is not there yet",
    ]


def test_what_does_not_fit_exits_with_3_and_is_told_all_the_same(folder: Path) -> None:
    result = call(*ON, "--recompute.mode", "none", "--json")
    assert result.exit_code == 3
    assert result.stderr.startswith("does not fit: pipeline rank 1 is the fullest with ")
    assert "it would fit with one of: " in result.stderr
    assert json.loads(result.stdout)["fits"] is False


@pytest.mark.parametrize("more", [[], ["--explain"]])
def test_what_is_read_on_a_terminal_says_so_once(folder: Path, more: list[str]) -> None:
    result = call(*ON, "--recompute.mode", "none", *more)
    assert result.exit_code == 3
    assert "does not fit" in result.stdout.splitlines()
    assert "is the fullest with" not in result.stdout
    assert result.stderr.count("is the fullest with") == 1


def test_explain_prints_formulas(folder: Path) -> None:
    result = call(*ON, "--explain")
    assert result.exit_code == 0
    assert "tokens/s a GPU = tokens/s / GPUs = " in result.stdout


@pytest.mark.parametrize(
    ("ep", "rows", "megabytes", "nodes"),
    [("8", "5.34", "89.6", ""), ("64", "7.78", "130.5", "one for each node of its experts, 5.34 of them")],
)
def test_explain_says_what_travels_between_experts(
    folder: Path, ep: str, rows: str, megabytes: str, nodes: str
) -> None:
    """4,096 tokens a rank, rows of 2,048 numbers of 2 bytes, 8 of 128 experts."""
    mixture = LARGE.replace("llama-3-405b", "qwen3-30b-a3b").replace("{tp: 8, pp: 16}", "{}")
    (folder / "run.yaml").write_text(mixture.replace("8192", "4096"))
    explained = call("--gpu", "h100", "--gpus", "64", "--parallel.ep", ep, "--explain").stdout
    (line,) = (line for line in explained.splitlines() if "ep, a layer and direction" in line)
    assert (
        f"4,096 tokens of a rank x {rows} rows (one for each rank of its experts) x 4,096 bytes = {megabytes} MB"
        in line
    )
    assert (nodes in line) if nodes else "node" not in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "16384"], "which GPU the plan is for is not known; give --gpu NAME (cluster.gpu), one of V100-"),
        (["--gpu", "h100"], "how many ranks there are is not known; give --gpus N (cluster.gpus)"),
        (["--gpu", "h10o", "--gpus", "16384"], "did you mean H100-SXM-80GB"),
        (["--gpu", "gone.yaml", "--gpus", "16384"], "gone.yaml"),
        (["--gpu", "h100", "--gpus", "1000"], "128"),
        ([*ON, "--cluster.nic_gbit_s", "400000000000"], "do you mean 400?"),
        ([*ON, "--cluster.price_per_gpu_hour", "-2"], "cluster.price_per_gpu_hour = -2"),
        ([*ON, "--model.vocab", "auto"], "model.vocab is auto"),
        ([*ON, "--precision.linear", "fp4"], "has no products in fp4"),
        ([*ON, "--ranks", "--explain"], "give them without --ranks and --build-rank"),
        ([*ON, "--build-rank", "0", "--html", "a.html"], "give them without --ranks and --build-rank"),
    ],
)
def test_what_cannot_be_is_one_message_and_exit_code_2(folder: Path, words: list[str], message: str) -> None:
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
