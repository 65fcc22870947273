"""A finished run beside what the planner says of it, term by term.

What the run's files measured stands beside the prediction; what they did not is shown as predicted only, with the
reason. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.config.run import Run
from fivefold.pipeline.measured import Measured
from fivefold.pipeline.of_run import microbatches_of
from fivefold.plan.calibration.factors import COMPUTATION, ENDS, ESTIMATED, Calibration
from fivefold.plan.calibration.measured import RunMeasured
from fivefold.plan.forecast_table import PARTS
from fivefold.plan.memory.peak import GIB, Memory
from fivefold.plan.quantities import count, percent, time
from fivefold.plan.table import table_lines
from fivefold.plan.time.formats import compute_format, product_format
from fivefold.plan.time.step import StepTime

HEAD = ("of the run", "predicted", "measured", "ratio", "")


@dataclass(frozen=True)
class Term:
    """A quantity of the run."""

    name: str
    title: str
    unit: str
    """`s`, `tokens/s`, `bytes` or `fraction`."""
    predicted: float
    measured: float | None
    remark: str
    """What the figure is, or why it was not measured."""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.measured is None or not self.predicted else self.measured / self.predicted

    def json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"ratio": self.ratio}

    def cells(self) -> tuple[str, ...]:
        """Below `HEAD`."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        measured = "" if self.measured is None else self._text(self.measured)
        return self.title, self._text(self.predicted), measured, ratio, self.remark

    def _text(self, value: float) -> str:
        if self.unit == "bytes":
            return f"{value / GIB:.3f} GiB"
        return {"s": time, "fraction": percent}.get(self.unit, count)(value)


@dataclass(frozen=True)
class Residual:
    """A run beside its prediction, and what follows for other plans."""

    run: RunMeasured
    accelerator: str
    """On which it was predicted."""
    terms: tuple[Term, ...]
    calibration: Calibration
    notes: tuple[str, ...]
    """What could not be told, and on what the factors rest."""
    gpu: str
    """The accelerator, as `cluster.gpu` names it."""

    def on_its_accelerator(self, run: Run) -> Run:
        """A run for which nothing else says the accelerator, on this one."""
        if run.cluster.gpu != "auto":
            return run
        return run.model_copy(update={"cluster": run.cluster.model_copy(update={"gpu": self.gpu})})

    def assumption(self) -> str:
        """What a plan takes for granted that is calibrated."""
        if not self.calibration.parts and self.calibration.memory is None:
            return f"{self.run.name} gives no factor, so all is as predicted"
        return (
            f"the factors of {self.run.name} hold for this run too; communication without a factor, and what lies "
            "beside tensors in memory, are as predicted"
        )

    def lines(self) -> list[str]:
        """For the terminal."""
        factors = [
            *((f"factor of {name}", factor) for name, factor in self.calibration.parts.items()),
            *([("factor of estimated memory", self.calibration.memory)] if self.calibration.memory else []),
        ]
        return [
            self.run.says(),
            *table_lines([HEAD, *(term.cells() for term in self.terms)]),
            *(f"{name} = {factor.how} = {factor.value:.3f}" for name, factor in factors),
            *self.notes,
        ]

    def json(self) -> dict[str, Any]:
        """As plain values."""
        steps, found = self.run.steps, self.calibration
        factors = dict(found.parts) | ({} if found.memory is None else {"memory": found.memory})
        return {
            "run": self.run.name,
            "folder": str(self.run.folder),
            "device": self.run.device,
            "accelerator": self.accelerator,
            "steps": {"first": steps[0], "last": steps[-1], "steady": len(steps), "trained": self.run.trained},
            "spread": list(self.run.spread),
            "terms": [term.json() for term in self.terms],
            "factors": {name: asdict(factor) for name, factor in factors.items()},
            "notes": list(self.notes),
        }


def parts_measured(found: RunMeasured, step: StepTime) -> dict[str, float]:
    """Seconds of the parts of a step that the run measured by themselves, of those that are predicted."""
    own = {"optimizer": found.update, "ep": found.exchange}
    return {name: seconds for name, seconds in own.items() if seconds and step.parts.get(name)}


def terms_of(run: Run, found: RunMeasured, step: StepTime, memory: Memory) -> Iterator[Term]:
    """All that is predicted of a run, with what it measured."""
    yield Term("step_seconds", "time of a step", "s", step.seconds, found.step_seconds, "without validation and saving")
    yield Term("tokens_per_s", "tokens/s", "tokens/s", step.tokens_per_s, found.tokens_per_s, "of the same times")
    if found.mfu is not None and product_format(run) == compute_format(run):
        yield Term("mfu", "MFU", "fraction", step.mfu, found.mfu, "of the same times")
    own = parts_measured(found, step)
    for name, meaning in PARTS.items():
        if seconds := step.parts.get(name, 0.0):
            yield Term(
                name, f"  {name}", "s", seconds, own.get(name), meaning if name in own else _why_not(name, found)
            )
    if found.pipeline is not None:
        yield from _actions(run, found.pipeline, step)
    yield from _held(found, memory)


def _why_not(name: str, found: RunMeasured) -> str:
    """Why a part of a step was not measured."""
    if name == "bubble" and found.pipeline is not None:
        return "see idle pipeline"
    if name in COMPUTATION:
        return "not measured: the run does not time single operations"
    return "not measured: the run does not time it apart"


def _actions(run: Run, record: Measured, step: StepTime) -> Iterator[Term]:
    """Of a pipeline: a microbatch's passes through all stages, a transfer, idle time."""
    times = record.times()
    sent = step.parts.get("transfer", 0.0) / microbatches_of(run) / run.parallel.chunks
    computed = [sum(stage[kind] - (sent / 2 if kind < 2 else 0.0) for stage in step.stages) for kind in range(3)]
    remark = f"of a microbatch, through all stages; in step {record.step}"
    kinds = ("forward", "gradients of inputs", "gradients of weights")
    for kind, ours, theirs in zip(kinds, computed, (times.forward, times.input, times.weight), strict=True):
        yield Term(kind.replace(" ", "_"), f"  {kind}", "s", ours, sum(theirs), remark)
    yield Term("hop", "  one transfer", "s", step.hop, times.transfer or None, "while nothing else ran")
    pipeline, timeline = step.seconds - sum(step.parts.get(name, 0.0) for name in ENDS), record.timeline()
    idle = 1 - max(timeline.busy) / timeline.makespan
    remark = f"of the pipeline's time on the busiest rank; in step {record.step}"
    yield Term("idle", "  idle pipeline", "fraction", step.parts["bubble"] / pipeline, idle, remark)


def _held(found: RunMeasured, memory: Memory) -> Iterator[Term]:
    """Memory of the fullest rank."""
    worst = memory.worst
    why = "most of any rank" if found.memory is not None else "not measured: a CPU tells what whole processes hold"
    yield Term("memory_allocated", "memory in tensors", "bytes", worst.allocated, found.memory, why)
    for name, size in worst.parts.items():
        if size:
            how = "estimated" if name in ESTIMATED else "counted"
            title = f"  {name.replace('_', ' ')}"
            yield Term(f"memory_{name}", title, "bytes", size, None, f"{how}, not measured apart")
