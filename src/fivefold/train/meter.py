"""From a step's tensors to its line of metrics, one step late so that the host never waits for the device.

While the device computes step k the host reads the result of step k - 1. Together with it the ranks agree on what one
of them asks for (stop, save), so all of them act in the same step.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor

from fivefold.config.run import Run
from fivefold.hardware.catalogue import by_driver_name
from fivefold.model.ledger import Totals
from fivefold.model.spec import train_flops_per_token
from fivefold.observe.metrics import StepRecord
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.moment import Moment
from fivefold.parallel.stopwatch import Lap
from fivefold.train.progress import Progress
from fivefold.train.reported import choices_by_layer, reported
from fivefold.train.step import StepResult


@dataclass(frozen=True)
class Reading:
    """What is known of a step once it was read."""

    record: StepRecord
    choices: Mapping[int, Sequence[int]]  # of each expert, by the number of the layer; empty without experts
    not_finite: list[str]  # parameters whose gradient held an infinity or NaN: the step changed nothing
    asked: tuple[bool, ...]  # what some rank asked for in that step


@dataclass(frozen=True)
class _Pending:
    step: int
    tokens: int
    lr: float
    squares: Tensor
    numbers: Mapping[str, Tensor]  # on the host; there once the device is at `end`
    end: Moment


class Meter:
    """Reads the steps of a run in order. `names` are the parameters, in the order of `StepResult.squares`."""

    def __init__(self, run: Run, mesh: Mesh, names: list[str]) -> None:
        self.run, self.mesh = run, mesh
        self.names = names
        self.tokens_a_step = run.batch.global_size * run.data.seq_len
        flops = train_flops_per_token(run.model, run.data.seq_len)
        peak = peak_flops(mesh.device, run.precision.compute)
        self.tokens_at_peak = None if peak is None else peak * mesh.world / flops  # tokens/s of an MFU of 1
        self.pending: _Pending | None = None
        self.exchange: Lap | None = None  # of the newest step
        self.update: Lap | None = None  # of the newest step
        self.since = Moment.mark(mesh.device)
        self.resume_clock()

    def push(self, progress: Progress, lr: float, result: StepResult, asks: tuple[bool, ...]) -> Reading | None:
        """Take the newest step's result and `asks`. Gives the reading of the step before, or on a CPU, where nothing
        runs ahead, the newest."""
        before = self.flush()
        votes = {
            "asked": list(map(float, asks)),
            "peak": [memory_peak(self.mesh.device)],
            "exchange": [] if self.exchange is None else [self.exchange.seconds()],
            "update": [] if self.update is None else [self.update.seconds()],
        }
        largest = torch.tensor([vote for some in votes.values() for vote in some], dtype=torch.float64)
        largest = self.mesh.max(largest.to(self.mesh.device, non_blocking=True))
        parts = {"loss": result.loss, "norm": result.norm}
        parts |= dict(zip(votes, largest.split([len(some) for some in votes.values()]), strict=True))
        parts |= {field.name: getattr(result.totals, field.name) for field in fields(Totals)}
        numbers = _to_host(parts)
        end = Moment.mark(self.mesh.device)
        if self.mesh.ep.stopwatch is not None:
            self.exchange = self.mesh.ep.stopwatch.lap()
        self.update = result.update
        self.pending = _Pending(progress.step, progress.tokens, lr, result.squares, numbers, end)
        return before if self.mesh.device.type == "cuda" else self.flush()

    def flush(self) -> Reading | None:
        """The reading of the newest step, waiting for the device; None if it was read already."""
        if self.pending is None:
            return None
        pending, self.pending = self.pending, None
        pending.end.wait()
        numbers = pending.numbers
        norm = numbers["norm"].item()
        bad = [] if norm < float("inf") else self._not_finite(pending.squares)
        seconds, self.since = pending.end.seconds_since(self.since), pending.end
        rate = self.tokens_a_step / seconds
        record = StepRecord(
            step=pending.step,
            tokens=pending.tokens,
            loss=numbers["loss"].item(),
            grad_norm=norm,
            lr=pending.lr,
            step_s=seconds,
            tok_per_s=rate,
            tok_per_s_gpu=rate / self.mesh.world,
            mfu=None if self.tokens_at_peak is None else rate / self.tokens_at_peak,
            mem_peak_gib=numbers["peak"].item() / 2**30,
        )
        totals = Totals(**{field.name: numbers[field.name] for field in fields(Totals)})
        more = reported(self.run, totals)
        if len(numbers["exchange"]):
            more["moe_exchange_s"] = numbers["exchange"].item()
        if len(numbers["update"]):
            more["update_s"] = numbers["update"].item()
        whole = cast(StepRecord, {**record, **more})  # a class cannot declare mtp_loss/DEPTH
        asked = tuple(bool(each) for each in numbers["asked"].tolist())
        return Reading(whole, choices_by_layer(self.run.model, totals), bad, asked)

    def resume_clock(self) -> None:
        """Start the next step's time now: what came before was validation or saving."""
        self.since = Moment.mark(self.mesh.device)
        if self.mesh.ep.stopwatch is not None:
            self.mesh.ep.stopwatch.lap()

    def _not_finite(self, squares: Tensor) -> list[str]:
        return [self.names[i] for i in (~torch.isfinite(squares)).nonzero().flatten().tolist()]


def _to_host(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names, in fp64, by one copy that the host does not wait for."""
    whole = torch.cat([part.double().flatten() for part in parts.values()]).to("cpu", non_blocking=True)
    pieces = whole.split([part.numel() for part in parts.values()])
    return {name: piece.view(part.shape) for (name, part), piece in zip(parts.items(), pieces, strict=True)}


def peak_flops(device: torch.device, compute: str) -> float | None:
    """FLOP/s of the device's dense products in this format; None where the catalogue does not say."""
    if device.type != "cuda" or compute not in ("bf16", "fp16"):
        return None
    accelerator = by_driver_name(torch.cuda.get_device_name(device))
    if accelerator is None:
        return None
    return accelerator.peak.get(compute) or accelerator.peak.get("bf16")


def memory_peak(device: torch.device) -> float:
    """Bytes at most so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
