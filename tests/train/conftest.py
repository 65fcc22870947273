"""A token set with something to learn, a run file for a model of 60,000 parameters, and the command that trains it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold import Run, train
from fivefold.data.writer import TokenWriter
from fivefold.observe.events import read_events
from fivefold.observe.metrics import read_metrics

VOCAB = 97
RUN_FILE = """
name: small
out: {out}
steps: 60
model: {{layers: 2, hidden: 32, heads: 4, kv_heads: 2, ffn: 64, vocab: 97, context: 64}}
data:
  train: [{{path: {data}}}]
  validation: [{{name: held, path: {data}}}]
  seq_len: 32
validate: {{every: 20, tokens: 640}}
batch: {{global_size: 8, micro_size: 2}}
precision: {{compute: fp32}}
optim: {{lr: 3e-3}}
checkpoint: {{every: 10}}
log: {{tensorboard: false}}
"""


def write_tokens(folder: Path, documents: int = 40, seed: int = 0) -> Path:
    """Documents of 1 to 200 tokens, each counting up from a random start by a random stride; the end token is 0."""
    writer = TokenWriter(folder, VOCAB, eod=0)
    generator = np.random.default_rng(seed)
    for _ in range(documents):
        start, stride, length = generator.integers((1, 1, 1), (VOCAB, 7, 200))
        tokens = np.append(1 + (start + stride * np.arange(length)) % (VOCAB - 1), 0)
        writer.write(tokens, np.array([len(tokens)]))
    writer.close()
    return folder


@dataclass(frozen=True)
class Trainer:
    """Trains a run file of its own: in this process (`train`), or by the command (`start`, `run`)."""

    file: Path
    out: Path
    capture: pytest.CaptureFixture[str]

    def train(self, *flags: str, **options: Any) -> str:
        """What one rank in this process prints; `flags` are over the run file, `options` are TrainOptions'."""
        train(Run.load(self.file, flags), **options)
        printed = self.capture.readouterr()
        return printed.out + printed.err

    def start(self, *flags: str) -> subprocess.Popen[str]:
        """`fivefold train`, running in a process group of its own."""
        command = [sys.executable, "-m", "fivefold", "train", str(self.file), *flags]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def run(self, *flags: str, code: int = 0) -> str:
        """The output of `fivefold train`, after it ended with `code`."""
        process = self.start(*flags)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == code, output
        return output

    def metrics(self, name: str = "small") -> list[dict]:
        """The lines of a run's metrics.jsonl."""
        return read_metrics(self.out / name / "metrics.jsonl")

    def events(self, name: str = "small") -> list[dict]:
        """The lines of a run's events.jsonl."""
        return read_events(self.out / name / "events.jsonl")

    def checkpoint(self, step: int, name: str = "small") -> Path:
        """The folder of a checkpoint."""
        return self.out / name / "checkpoints" / f"step-{step:08}"


@pytest.fixture
def trainer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Trainer:
    """A trainer in a folder of its own."""
    return trainer_in(tmp_path, capfd)


def trainer_in(folder: Path, capture: pytest.CaptureFixture[str] | None = None) -> Trainer:
    """A trainer with its own tokens and run file in `folder`; without a capture it cannot `train` here."""
    file = folder / "run.yaml"
    file.write_text(RUN_FILE.format(out=folder / "runs", data=write_tokens(folder / "tokens")))
    return Trainer(file, folder / "runs", capture)  # type: ignore[arg-type]


def train_as_worker(file: Path, flags: list[str], stop_after: int | None) -> None:
    """Be one rank of a run, as its environment says."""
    train(Run.load(file, flags), launcher="env", stop_after=stop_after)
