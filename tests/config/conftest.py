"""A small legal run file in a folder of its own, and a short way to load it with flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fivefold import Run
from fivefold.config.files import ConfigError, load_run

RUN_FILE = """\
name: tiny
steps: 300
model:
  preset: tiny-llama
data:
  train:
  - {path: data/a, weight: 1.0}
  - {path: data/b, weight: 2.0}
  validation:
  - {name: held-out, path: data/c}
  seq_len: 256
batch: {global_size: 8, micro_size: 4}
"""

Load = Callable[..., Run]
Refusal = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: empty but for run.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    return tmp_path


@pytest.fixture
def load(folder: Path) -> Load:
    """`load("--optim.lr", "1")` loads run.yaml with flags, to be trained; `text=` puts other text there first."""

    def load(*flags: str, text: str | None = None) -> Run:
        if text is not None:
            (folder / "run.yaml").write_text(text)
        return load_run(folder / "run.yaml", flags)

    return load


@pytest.fixture
def unchecked(folder: Path) -> Load:
    """As `load`, whatever rules the run breaks."""

    def unchecked(*flags: str) -> Run:
        return load_run(folder / "run.yaml", flags, rules=())

    return unchecked


@pytest.fixture
def refusal(load: Load) -> Refusal:
    """As `load`, for a file that must be refused: returns the message."""

    def refusal(*flags: str, text: str | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            load(*flags, text=text)
        return str(caught.value)

    return refusal
