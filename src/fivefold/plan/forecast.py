"""What a run will be like on a cluster: time, memory, cost and storage together, as `fivefold plan` tells them.

The parts come from their own files; here they are put together under named assumptions, each figure with where it comes
from and how far off such a figure was on published runs. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fivefold.config.files import ConfigError
from fivefold.config.rules import check
from fivefold.config.run import Run
from fivefold.hardware.local import local_accelerator
from fivefold.hardware.rule import which_gpu
from fivefold.pipeline.of_run import microbatches_of
from fivefold.pipeline.schedule import Schedule
from fivefold.plan.basis import notes_above_peak, rates_basis, rates_sentence, says_peak
from fivefold.plan.budget import Budget, budget_of
from fivefold.plan.calibration.factors import Calibration
from fivefold.plan.cluster import Cluster, cluster_of, notes_on_nodes
from fivefold.plan.cost import Cost
from fivefold.plan.execution import OURS, Execution, check_hot_experts
from fivefold.plan.figures import Figure, figures_of
from fivefold.plan.goodput.failures import Failures, failures_of
from fivefold.plan.goodput.lasting import lasting_cost, own_tier, says_failures
from fivefold.plan.memory.peak import GIB, Memory
from fivefold.plan.published import accuracy
from fivefold.plan.published.accuracy import Bar
from fivefold.plan.quantities import plain
from fivefold.plan.remedies import TRIED, Remedy, remedies
from fivefold.plan.scaling import Point, scaling
from fivefold.plan.software import Software
from fivefold.plan.storage import Storage, saved, storage_of
from fivefold.plan.time.step import StepTime
from fivefold.plan.vocabulary import VOCABULARY_SAID, with_vocabulary

SCHEMA = 1
"""Of the JSON; it changes when a key goes or means something else, not when one is added."""
FAILURES = "llama3"
"""The published rate at which machines are taken to fail, unless another is asked for."""
CONVENTION = "FLOPs of the model without recomputation, attention causal, over the dense peak"
"""Of the MFU."""


@dataclass(frozen=True)
class Forecast:
    """A run's time, memory, cost and storage."""

    run: Run
    """Its ranks, its accelerator and its vocabulary are known."""
    cluster: Cluster
    execution: Execution
    software: Software
    """That of the execution on this layout."""
    schedule: Schedule | None
    """Of the pipeline; None with a single stage."""
    notes: tuple[str, ...]
    step: StepTime
    memory: Memory
    budget: Budget
    cost: Cost
    storage: Storage
    failures: Failures

    @property
    def fits(self) -> bool:
        """Whether the fullest rank finds room."""
        return self.memory.fits

    @property
    def microbatches(self) -> int:
        """Of a rank in a step."""
        return microbatches_of(self.run)

    @property
    def rates_basis(self) -> str:
        """Where its times come from: measured, calibrated, or assumed; or the finished run that corrects them."""
        found = self._corrects_time
        return rates_basis(self.cluster.accelerator) if found is None else self._basis(found)

    @property
    def shares_basis(self) -> str:
        """The same of the shares of its time, which no run measures."""
        found = self._corrects_time
        return rates_basis(self.cluster.accelerator) if found is None else found.word

    @property
    def memory_basis(self) -> str:
        """Where its memory in tensors comes from."""
        found = self._corrects_memory
        return "calibrated" if found is None else self._basis(found)

    @property
    def reserved_basis(self) -> str:
        """Where what the allocator reserves comes from, which no run measures."""
        found = self._corrects_memory
        return "calibrated" if found is None else found.word

    @property
    def time_bar(self) -> Bar | None:
        """The error of published runs' step times; None of a time that a finished run corrects, which nobody tried."""
        return accuracy.of_step_time(self.run, self.cluster.accelerator) if self._corrects_time is None else None

    @property
    def memory_bar(self) -> Bar | None:
        """The same of its memory."""
        return accuracy.of_memory(self.run) if self._corrects_memory is None else None

    def _basis(self, found: Calibration) -> str:
        return found.basis(self.run, self.execution.hot_experts)

    @property
    def _corrects_time(self) -> Calibration | None:
        found = self.execution.residual
        return found.calibration if found is not None and found.calibration.of_time else None

    @property
    def _corrects_memory(self) -> Calibration | None:
        found = self.execution.residual
        return found.calibration if found is not None and found.calibration.memory is not None else None

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        """All that is told, in its order."""
        return figures_of(self)

    @cached_property
    def remedies(self) -> tuple[Remedy, ...]:
        """Changes after each of which the run would fit; none if it does."""
        return () if self.fits else remedies(self.run, self.cluster, self.execution)

    @cached_property
    def scaling(self) -> tuple[Point, ...]:
        """The same run on fewer and on more accelerators."""
        return scaling(self.run, self.failures, self.step.tokens_per_s / self.cluster.gpus, self.execution)

    def figure(self, name: str) -> Figure:
        """One of the figures. Raises KeyError for another name."""
        return {figure.name: figure for figure in self.figures}[name]

    def assumptions(self) -> list[str]:
        """What is taken to be so, in sentences."""
        residual = self.execution.residual
        found = [
            *(() if residual is None else (residual.assumption(),)),
            rates_sentence(self.cluster.accelerator),
            self.execution.says_software(),
            f"MFU: {CONVENTION} {says_peak(self.run, self.cluster.accelerator)}",
        ]
        if self.run.precision.compute == "fp64":
            found.append("products in fp64 are as fast as in fp32")
        if {"optimizer", "parameters"} & set(self.run.offload):
            found.append("CPUs update weights as fast as those of one machine with an H200 were measured to")
        if self.run.model.moe is not None:
            found.append(self.execution.says_load())
        return [*found, *says_failures(self.run, self.cost)]

    @property
    def tight(self) -> bool:
        """Whether it fits by less than nine of ten published runs were off in memory."""
        return self.memory_bar is not None and self.memory.is_tight(self.memory_bar.p90)

    def verdict(self) -> str:
        """Whether it fits, with the numbers."""
        worst, left = self.memory.worst, ""
        if self.tight and self.memory_bar is not None:
            room, error = self.memory.capacity - worst.needed, self.memory_bar.p90 * worst.allocated
            left = f"; tight: {room / GIB:.2f} GiB are left, and the error is {error / GIB:.2f}"
        return (
            f"{'fits' if self.fits else 'does not fit'}: pipeline rank {worst.pp} is the fullest with "
            f"{worst.allocated / GIB:.2f} GiB in tensors + {worst.overhead.context / GIB:.2f} GiB beside them, of "
            f"{self.memory.capacity / GIB:.2f} GiB ({worst.moment}){left}"
        )

    def short_verdict(self) -> str:
        """The verdict below a table, without numbers if it does not fit: `too_much`, which is said last, has them."""
        return self.verdict() if self.fits else "does not fit"

    def too_much(self) -> str | None:
        """What to say of a run that is legal and does not fit; None if it fits."""
        if self.fits:
            return None
        if not self.remedies:
            return f"{self.verdict()}; no one or two changes of {TRIED} mend it"
        return f"{self.verdict()}; it would fit with one of: {'; '.join(each.line() for each in self.remedies)}"

    def lines(self) -> list[str]:
        """For a terminal."""
        from fivefold.plan.forecast_table import lines_of

        return lines_of(self)

    def explain(self) -> list[str]:
        """Each figure's formula with its numbers."""
        from fivefold.plan.explain import explanation

        return explanation(self)

    def json(self) -> dict[str, Any]:
        """All of it as plain values; the keys are documented in docs/planning.md."""
        run, parallel = self.run, self.run.parallel
        return {
            "schema": SCHEMA,
            "run": {
                "name": run.name,
                "model": run.model.preset or run.model.from_ or run.model.family,
                "vocabulary": run.model.vocab,
                "layout": {name: getattr(parallel, name) for name in LAYOUT},
                "recompute": run.recompute.mode,
                "offload": list(run.offload),
                "microbatches": self.microbatches,
                "micro_size": run.batch.micro_size,
                "global_size": run.batch.global_size,
                "seq_len": run.data.seq_len,
            },
            "cluster": self.cluster.json(),
            **self.execution.json(),
            "calibration": None if self.execution.residual is None else self.execution.residual.json(),
            "fits": self.fits,
            "tight": self.tight,
            "figures": {figure.name: figure.json() for figure in self.figures},
            "time": {
                "parts": plain(self.step.parts),
                "stages": [dict(zip(("forward", "input", "weight"), each, strict=True)) for each in self.step.stages],
                "hop": self.step.hop,
            },
            "memory": self.memory.json(),
            "budget": self.budget.json(),
            "cost": self.cost.json(),
            "storage": self.storage.json(),
            "scaling": [point.json() for point in self.scaling],
            "remedies": [remedy.json() for remedy in self.remedies],
            "assumptions": self.assumptions(),
            "notes": list(self.notes),
        }


LAYOUT = ("pp", "dp", "cp", "tp", "ep", "replicate", "zero", "schedule", "chunks")
"""The keys of `parallel` that the JSON repeats."""


def forecast(
    run: Run,
    schedule: Schedule | None = None,
    notes: tuple[str, ...] = (),
    failures: str | float = FAILURES,
    execution: Execution = OURS,
) -> Forecast:
    """The forecast of a legal run whose ranks are known, with its pipeline's schedule.

    `failures` is a published rate by name, or failures in 1,000 node-days. Raises UserError if nothing says the
    vocabulary or the accelerator, and as `cluster_of`, `failures_of`, `Execution.software` and `check_hot_experts`.
    """
    run = with_known_machine(run if execution.residual is None else execution.residual.on_its_accelerator(run))
    cluster = cluster_of(run)
    check_hot_experts(run.model, run.parallel.ep, execution.hot_experts)
    software = execution.software(run.parallel)
    step = execution.step_time(run, cluster)
    rate = failures_of(failures)
    return Forecast(
        run=run,
        cluster=cluster,
        execution=execution,
        software=software,
        schedule=schedule,
        notes=(
            *notes,
            *notes_on_nodes(cluster, run.parallel.tp, run.parallel.ep),
            *notes_above_peak(run, cluster.accelerator, step.mfu),
        ),
        step=step,
        memory=execution.memory(run, cluster),
        budget=budget_of(run, cluster.accelerator, efficiency=min(1.0, step.mfu)),
        cost=lasting_cost(run, cluster, step.seconds, rate),
        storage=_storage(run, cluster, step.seconds),
        failures=rate,
    )


def with_known_machine(run: Run) -> Run:
    """With the vocabulary and the accelerator that data and machine tell.

    Raises ConfigError with what of the two they do not.
    """
    if run.cluster.gpu == "auto" and (found := local_accelerator()) is not None:
        run = run.model_copy(update={"cluster": run.cluster.model_copy(update={"gpu": found.name})})
    unknown = [which_gpu()] if run.cluster.gpu == "auto" else []
    if unknown := [*unknown, *check(run, rules=(VOCABULARY_SAID,))]:
        raise ConfigError(unknown)
    return with_vocabulary(run)


def _storage(run: Run, cluster: Cluster, seconds: float) -> Storage:
    """With the run's own checkpoints as its one tier, if it saves before its end."""
    tiers = [own_tier(run, cluster, seconds)] if saved(run) == "on the way" else []
    return storage_of(run, cluster, seconds, tiers)
