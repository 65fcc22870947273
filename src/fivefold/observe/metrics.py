"""metrics.jsonl: what each optimizer step measured, one line a step, written once even when a crash repeats the step.

experts.jsonl is another such file, of the steps at which it is due.

The train loop writes a step's line, then validates and adds to that line, then saves. So when a checkpoint of step k
exists, line k is whole; when the run dies before, the line goes at resume and is written again by the repeated step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from fivefold.observe.lines import LineFile, read_lines


class StepRecord(TypedDict):
    """What a line holds at least. All numbers are over all ranks unless said otherwise.

    The load of an expert is its share of a layer's choices over the share of each if all were equal: 1 is even. Models
    with multi-token prediction have mtp_loss/1, mtp_loss/2 and so on too: the mean loss of each depth, in nats.
    """

    step: int
    """Optimizer steps done, this one included: the first is 1. Step 0 has a line with validation only."""
    tokens: int
    """Tokens read since the start of the run."""
    loss: float
    """Mean cross-entropy over all labels of the global batch, in nats."""
    grad_norm: float
    """Global norm of the gradient before clipping; not finite means that the step changed nothing."""
    lr: float
    """Learning rate that this step used."""
    step_s: float
    """Seconds from the end of the step before to the end of this one, without validation and saving."""
    tok_per_s: float
    """Tokens of the step / step_s."""
    tok_per_s_gpu: float
    """tok_per_s / number of ranks."""
    mfu: float | None
    """Model FLOPs over the peak FLOPs of all ranks; causal attention counted as computed, recompute not counted.
    None where the peak is not known, as on a CPU."""
    mem_peak_gib: float
    """Most memory that any rank held at once so far, in GiB: allocated on a GPU, resident on a CPU."""
    update_s: NotRequired[float]
    """Seconds in which a rank's device updated its weights in the step before, of the rank that took longest. The first
    step of a start has none."""
    moe_load_max: NotRequired[float]
    """With experts: the largest load of all experts in all layers."""
    moe_load_mean: NotRequired[float]
    """With experts: the mean over layers of the largest load in each."""
    moe_entropy: NotRequired[float]
    """With experts: the mean over layers of the entropy of the choices, as a share of its largest, ln(experts)."""
    moe_dropped: NotRequired[float]
    """With experts: the share of all choices that found their expert full."""
    balance_loss: NotRequired[float]
    """With such a loss: all balance losses, as they are added to the loss."""
    z_loss: NotRequired[float]
    """With such a loss: the router's z-loss, as it is added to the loss."""
    moe_exchange_s: NotRequired[float]
    """With experts over several ranks: seconds in which a rank's device stood still for all-to-alls in the step before,
    of the rank that waited longest. The first step of a start has none."""


class MetricsFile:
    """The metrics of the run at `path`, one line a step; or other fields of steps, in a file of their own.

    `resume_step` is the step of the checkpoint that the run goes on from: lines after it are dropped, and so is a torn
    last line. None starts anew and drops all. Raises OSError where the file cannot be written; lines that a full disk
    refused are kept and written as soon as there is room.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        kept = -1 if resume_step is None else resume_step
        self._file = LineFile(path, keep=lambda fields: _step_of(fields) is not None and fields["step"] <= kept)

    def write(self, step: int, fields: Mapping[str, Any]) -> None:
        """Add `fields` to the line of `step`. A key that the line has already keeps its value: it was written once.

        Raises ValueError for a step before the newest one: lines stand in the order of steps.
        """
        newest = self._file.last["step"] if self._file.last else -1
        if step < newest:
            raise ValueError(f"metrics of step {step} after those of step {newest}")
        if step > newest:
            self._file.append({"step": step} | {key: value for key, value in fields.items() if key != "step"})
            return
        new = {key: value for key, value in fields.items() if key not in (self._file.last or {})}
        if new:
            self._file.extend(new)

    def sync(self) -> None:
        """Return when all lines are on the disk: before a checkpoint of the newest step becomes the newest one."""
        self._file.sync()

    def close(self) -> None:
        """Sync and close."""
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl in the order of steps, NaN and infinities as floats, without a torn last line."""
    return list(read_lines(path))


def _step_of(fields: Mapping[str, Any]) -> int | None:
    step = fields.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None
