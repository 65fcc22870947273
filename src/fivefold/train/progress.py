"""How far a run has come: the numbers that a checkpoint keeps beside the tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fivefold.config.run import Run
from fivefold.data.loader import Step


@dataclass
class Progress:
    """What has been done since the start of the run."""

    step: int = 0
    """Optimizer steps."""
    samples: int = 0
    """Samples delivered over all ranks: the data cursor."""
    tokens: int = 0
    """Tokens of those samples."""

    def advance(self, batch: Step, seq_len: int) -> None:
        """One more step, that of `batch`."""
        self.step += 1
        self.samples = batch.first_sample + batch.size
        self.tokens += batch.size * seq_len

    def with_steps(self, run: Run) -> Run:
        """`run` with its number of steps: one of so many tokens reads those that are left in batches of its size."""
        if run.tokens is None:
            return run
        left = max(0, int(run.tokens) - self.tokens)
        steps = self.step - (-left // (run.batch.global_size * run.data.seq_len))
        return run.model_copy(update={"steps": steps, "tokens": None})

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    @classmethod
    def of(cls, state: dict[str, Any]) -> Progress:
        """From a checkpoint."""
        return cls(**{name: state[name] for name in ("step", "samples", "tokens")})
