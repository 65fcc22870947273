"""What the README and the page on metrics promise to those who call Fivefold from Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fivefold
import fivefold.plan
import fivefold.train
from fivefold.errors import UserError
from tests.train.conftest import RUN_FILE, write_tokens

ROOT = Path(__file__).parents[1]


def example(page: str) -> str:
    """The Python example that ends a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)[-1]


def test_run_plan_and_train_are_there_and_importing_them_loads_no_torch() -> None:
    code = (
        "import sys; from fivefold import Run, plan, train; assert callable(plan) and callable(train)\n"
        "assert callable(Run.load)"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
    with pytest.raises(AttributeError, match="module 'fivefold' has no attribute 'trian'"):
        fivefold.trian  # noqa: B018


def test_what_is_legal_is_read_and_planned_and_what_cannot_run_yet_is_refused_by_training(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("name: a\nsteps: 1\nmodel: {preset: tiny-llama, vocab: 1003}\ndata: {train: [{path: x}]}\n")
    run = fivefold.Run.load(file, ["--parallel.pp", "2", "--parallel.dp", "1"])
    planned = fivefold.plan(run)
    assert [len(layers) for layers in planned.ranks().stages] == [2, 2]
    assert planned.build_rank(1).stages == {1: range(2, 4)}
    half = fivefold.Run.load(file, ["--parallel.dp", "1", "--precision.compute", "fp16"])
    assert fivefold.plan(half).notes
    with pytest.raises(UserError, match="does not scale the loss as fp16 needs"):
        fivefold.train(half)
    with pytest.raises(UserError, match=r"cannot be split over parallel\.tp = 3"):
        fivefold.Run.load(file, ["--parallel.tp", "3"])


def test_the_example_plans_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = "{preset: tiny-llama, vocab: 1003}"
    Path("run.yaml").write_text(f"name: a\nsteps: 1\nmodel: {model}\ndata: {{train: [{{path: x}}]}}\n")
    names: dict = {}
    exec(example("docs/planning.md"), names)
    assert names["stages"] == [range(4)]
    assert names["held"]["weights"] > 0
    assert names["days"] > 0
    assert names["fits"]


def test_the_examples_train_a_run_and_read_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_tokens(tmp_path / "tokens")
    text = RUN_FILE.format(out="runs", data=data).replace("name: small", "name: tiny").replace("steps: 60", "steps: 3")
    Path("mine.yaml").write_text(text)
    names: dict = {}
    exec(example("README.md"), names)
    assert names["folder"] == Path("runs/tiny")
    exec(example("docs/metrics.md"), names)
    assert len(names["losses"]) == 3
    assert fivefold.Run.load(names["folder"] / "run.yaml").optim.lr == 1e-3
