"""What the README and the page on metrics promise to those who call Fivefold from Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import fivefold
from tests.train.conftest import RUN_FILE, write_tokens

ROOT = Path(__file__).parents[1]


def example(page: str) -> str:
    """The only Python example of a page."""
    (found,) = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return found


def test_run_and_train_are_there_and_importing_them_loads_no_torch() -> None:
    code = "import sys; from fivefold import Run, train; assert callable(train) and callable(Run.load)"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
    with pytest.raises(AttributeError, match="module 'fivefold' has no attribute 'trian'"):
        fivefold.trian  # noqa: B018


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
