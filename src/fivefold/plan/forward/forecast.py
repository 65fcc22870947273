"""The forward of a run's model alone, as prefill or validation passes it: time, memory and what they rest on.

`batch.global_size` sequences of `data.seq_len` go through the model once; no backward follows, and nothing is updated.
The formulas are those of a training step, and so are the constants. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from fivefold.config.files import ConfigError
from fivefold.config.rules import FORWARD, NOT_YET, broken_rules, check, with_world
from fivefold.config.run import Recompute, Run
from fivefold.hardware.rule import ACCELERATOR
from fivefold.model.spec import forward_flops_per_token, parameters
from fivefold.plan.basis import rates_basis, rates_sentence, says_peak
from fivefold.plan.cluster import Cluster, cluster_of
from fivefold.plan.execution import OURS, Execution, check_hot_experts
from fivefold.plan.figures import Figure
from fivefold.plan.forecast import LAYOUT, SCHEMA, with_known_machine
from fivefold.plan.forward.memory import ForwardMemory, forward_memory
from fivefold.plan.forward.time import ForwardTime, forward_time
from fivefold.plan.memory.overhead import GIB
from fivefold.plan.planned import world_of
from fivefold.plan.quantities import plain
from fivefold.plan.software import Software
from fivefold.plan.time.formats import product_format


@dataclass(frozen=True)
class Forward:
    """A forward pass of a legal run."""

    run: Run
    """Its ranks, its accelerator and its vocabulary are known; of its batch a share has whole sequences."""
    cluster: Cluster
    execution: Execution
    software: Software
    sequences: int
    """Of the busiest share."""
    microbatches: int
    """In which they pass."""
    time: ForwardTime
    memory: ForwardMemory
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the fullest rank finds room."""
        return self.memory.fits

    @property
    def tokens(self) -> int:
        """That pass, of all shares."""
        return self.run.batch.global_size * self.run.data.seq_len

    @property
    def tokens_per_s(self) -> float:
        """Of the whole cluster."""
        return self.tokens / self.time.seconds

    @property
    def flops(self) -> float:
        """Of the pass, by the convention of `model/spec.py`: forward alone, attention causal."""
        return float(forward_flops_per_token(self.run.model, self.run.data.seq_len)) * self.tokens

    @property
    def peak(self) -> float:
        """FLOP/s of an accelerator in the format of the linear layers."""
        return self.cluster.accelerator.peak_of(product_format(self.run))

    @property
    def mfu(self) -> float:
        """Those FLOPs over the dense peak."""
        return self.flops / (self.time.seconds * self.cluster.gpus * self.peak)

    @property
    def rates_basis(self) -> str:
        """Where the rates of the accelerator come from: measured, calibrated, or assumed."""
        return rates_basis(self.cluster.accelerator)

    @property
    def parameters(self) -> int:
        """Of the model, without multi-token prediction."""
        return parameters(self.run.model).total

    @cached_property
    def figures(self) -> tuple[Figure, ...]:
        """All that is told, in its order."""
        from fivefold.plan.forward.table import forward_figures

        return forward_figures(self)

    def figure(self, name: str) -> Figure:
        """One of the figures. Raises KeyError for another name."""
        return {figure.name: figure for figure in self.figures}[name]

    def assumptions(self) -> list[str]:
        """What is taken to be so, in sentences."""
        run = self.run
        found = [
            rates_sentence(self.cluster.accelerator),
            self.execution.says_software(),
            "MFU: FLOPs of the forward, attention causal, over the dense peak "
            + says_peak(run, self.cluster.accelerator),
            "weights are in the format in which they are multiplied, keys and values of all tokens stay",
            "all tokens' logits are computed, as for a loss",
        ]
        if run.model.moe is not None:
            found.append(self.execution.says_load())
        return found

    def verdict(self) -> str:
        """Whether it fits, with the numbers."""
        worst = self.memory.worst
        return (
            f"{'fits' if self.fits else 'does not fit'}: pipeline rank {worst.pp} is the fullest with "
            f"{worst.allocated / GIB:.2f} GiB in tensors + {worst.overhead.context / GIB:.2f} GiB beside them, of "
            f"{self.memory.capacity / GIB:.2f} GiB"
        )

    def short_verdict(self) -> str:
        """The verdict below a table, without numbers if it does not fit: `too_much`, which is said last, has them."""
        return self.verdict() if self.fits else "does not fit"

    def too_much(self) -> str | None:
        """What to say of a pass that does not fit; None if it fits."""
        if self.fits:
            return None
        parts = self.memory.worst.parts
        name = max(parts, key=lambda each: parts[each])
        what, ways = MOST[name]
        return f"{self.verdict()}; most of it are {what} ({parts[name] / GIB:.2f} GiB), fewer with more {ways}"

    def lines(self) -> list[str]:
        """For a terminal."""
        from fivefold.plan.forward.table import lines_of

        return lines_of(self)

    def explain(self) -> list[str]:
        """Each figure's formula with its numbers."""
        from fivefold.plan.forward.table import explanation

        return explanation(self)

    def json(self) -> dict[str, Any]:
        """All of it as plain values; the keys are documented in docs/planning.md."""
        run = self.run
        return {
            "schema": SCHEMA,
            "mode": "forward",
            "run": {
                "name": run.name,
                "model": run.model.preset or run.model.from_ or run.model.family,
                "layout": {name: getattr(run.parallel, name) for name in LAYOUT},
                "microbatches": self.microbatches,
                "micro_size": run.batch.micro_size,
                "global_size": run.batch.global_size,
                "seq_len": run.data.seq_len,
            },
            "cluster": self.cluster.json(),
            **self.execution.json(),
            "fits": self.fits,
            "figures": {figure.name: figure.json() for figure in self.figures},
            "time": {"parts": plain(self.time.parts), "stages": list(self.time.stages), "hop": self.time.hop},
            "memory": self.memory.json() | {"explanation": list(self.memory.explanation())},
            "assumptions": self.assumptions(),
            "notes": list(self.notes),
        }


MOST = {
    "weights": ("weights", "tp, pp or ep, or ZeRO 3, or precision.linear in 8 bits"),
    "gathered_weights": ("weights of two units", "tp or ep"),
    "keys_and_values": ("keys and values", "cp, tp or pp, or a smaller batch"),
    "working": ("a layer's activations", "cp or tp, or a smaller batch.micro_size"),
    "logits": ("logits", "tp or cp"),
    "communication": ("blocks of other ranks", "tp, or with parallel.cp_method ring"),
}
"""By category what it is, and which degrees make it smaller."""


def forward(run: Run, execution: Execution = OURS) -> Forward:
    """The forward pass of `run`. Rules that only a training step has to obey do not count.

    Raises ConfigError with the other rules that the run breaks, UserError if nothing says the ranks, the accelerator or
    the vocabulary, or as `cluster_of` does.
    """
    world = world_of(run)
    _check(run, world)
    run = with_known_machine(with_world(run, world))
    _check(run, world)
    check_hot_experts(run.model, run.parallel.ep, execution.hot_experts)
    run, sequences = _passes(run)
    cluster, software = cluster_of(run), execution.software(run.parallel)
    microbatches = ceil(sequences / run.batch.micro_size)
    return Forward(
        run=run,
        cluster=cluster,
        execution=execution,
        software=software,
        sequences=sequences,
        microbatches=microbatches,
        time=forward_time(run, cluster, software, microbatches),
        memory=forward_memory(run, cluster, software, sequences),
        notes=tuple(_notes(run, sequences)),
    )


def _check(run: Run, world: int) -> None:
    if broken := check(run, world, (*FORWARD, ACCELERATOR)):
        raise ConfigError(broken)


def _passes(run: Run) -> tuple[Run, int]:
    """The run without what a backward needs, and the sequences of its busiest share."""
    assert run.parallel.dp != "auto", "the ranks are known"
    sequences = ceil(run.batch.global_size / run.parallel.dp)
    micro = min(run.batch.micro_size, sequences)
    stages = "auto" if run.parallel.layers_per_stage == "memory" else run.parallel.layers_per_stage
    return run.model_copy(
        update={
            "model": run.model.model_copy(update={"mtp": 0}),
            "batch": run.batch.model_copy(update={"micro_size": micro}),
            "parallel": run.parallel.model_copy(update={"layers_per_stage": stages}),
            "recompute": Recompute(),
            "offload": [],
        }
    ), sequences


def _notes(run: Run, sequences: int) -> list[str]:
    """What is legal, and should be known."""
    size, dp = run.batch.global_size, run.parallel.dp
    assert dp != "auto", "the ranks are known"
    found = [rule.says(run) for rule in broken_rules(run, NOT_YET) if "precision.moments" not in rule.about]
    if size % dp:
        found.append(f"{size:,} sequences on dp {dp:,}: the busiest shares have {sequences:,}, others fewer or none")
    return found
