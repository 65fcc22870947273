"""What a finished run corrects of a plan: factors of the terms that it measured, and what they do to a forecast.

Computation has one factor, because a run knows the time of its steps and not of single operations. A communication has
one only if the run measured it by itself, and only where the plan's ranks are joined by the same links; else it stays
as predicted. Of memory what is counted exactly stays, and what is estimated has a factor. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fivefold.config.run import Run
from fivefold.plan.cluster import Cluster
from fivefold.plan.memory.peak import Memory
from fivefold.plan.time.step import COMMUNICATION, StepTime

COMPUTATION = ("products", "attention", "pointwise", "gradients", "recompute", "optimizer")
"""The parts of a step that are computation."""
ENDS = ("reduction", "optimizer")
"""The parts that come once, behind the microbatches."""
ESTIMATED = ("activations", "working", "logits", "communication")
"""Categories of memory that are estimated. The others are what the parameters of a rank come to, byte for byte."""


@dataclass(frozen=True)
class Factor:
    """Measured over predicted."""

    value: float
    how: str
    """Its formula with its numbers."""


@dataclass(frozen=True)
class Calibration:
    """The factors that a run gives, for plans on the accelerator that it ran on."""

    name: str
    """Of the run."""
    parts: Mapping[str, Factor]
    """By part of a step; `computation` is that of all computation without a factor of its own. None, or all of them."""
    memory: Factor | None
    links: Mapping[str, Any]
    """What joined the ranks of the communications that were measured (`links_of`)."""
    itself: Mapping[str, Any]
    """What of the run its time and memory depend on (`identity`)."""
    hot_experts: float = 1.0
    """As the run counted them."""

    def basis(self, run: Run, hot_experts: float) -> str:
        """Where a calibrated figure of a plan comes from: it is the measured one if the run is the same."""
        same = hot_experts == self.hot_experts and identity(run) == self.itself
        return "measured" if same else self.word

    @property
    def word(self) -> str:
        """Where a figure comes from that follows from its factors."""
        return f"calibrated on {self.name}"

    @property
    def of_time(self) -> bool:
        """Whether it corrects the time of a step."""
        return bool(self.parts)

    def factor(self, part: str, run: Run, cluster: Cluster) -> float:
        """Of a part of a step on a plan's ranks; 1 where the run says nothing of it."""
        own = self.parts.get(part)
        if part in COMPUTATION:
            own = own or self.parts.get("computation")
        elif not self.joined_alike(part, run, cluster):
            own = None
        return 1.0 if own is None else own.value

    def joined_alike(self, part: str, run: Run, cluster: Cluster) -> bool:
        """Whether a plan's ranks are joined for a communication as those that measured it."""
        return bool(links_of(run, cluster).get(part) == self.links.get(part))

    def step(self, found: StepTime, run: Run, cluster: Cluster) -> StepTime:
        """A predicted step, corrected; the pipeline's idle time in the proportion of what the ranks wait for."""
        if not self.of_time:
            return found
        parts = {name: seconds * self.factor(name, run, cluster) for name, seconds in found.parts.items()}
        before, after = microbatch_seconds(found.parts), microbatch_seconds(parts)
        longer = after / before if before else 1.0
        parts["bubble"] = found.parts.get("bubble", 0.0) * longer
        total = sum(parts.values())
        exposed = sum(parts.get(name, 0.0) for name in COMMUNICATION)
        hidden = (found.communication - found.exposed) * found.seconds
        return replace(
            found,
            seconds=total,
            tokens_per_s=found.tokens_per_s * found.seconds / total,
            mfu=found.mfu * found.seconds / total,
            bubble=parts["bubble"] / total,
            parts=parts,
            communication=(exposed + hidden) / total,
            exposed=exposed / total,
            stages=tuple((f * longer, i * longer, w * longer) for f, i, w in found.stages),
            hop=found.hop * self.factor("transfer", run, cluster),
        )

    def held(self, found: Memory) -> Memory:
        """A predicted memory, with what is estimated of it corrected."""
        if self.memory is None:
            return found
        return scaled(found, self.memory.value)

    def line(self) -> str:
        """The factors."""
        factors = [f"{name} x {factor.value:.3f}{self._where(name)}" for name, factor in self.parts.items()]
        if self.memory is not None:
            factors.append(f"estimated memory x {self.memory.value:.3f}")
        return f"{self.word}: {', '.join(factors) or 'nothing could be told'}"

    def _where(self, part: str) -> str:
        return " between ranks that are joined alike" if part in self.links else ""


def scaled(found: Memory, factor: float) -> Memory:
    """A memory whose estimated categories are so many times as large."""
    ranks = (
        replace(
            rank,
            parts={name: size * (factor if name in ESTIMATED else 1.0) for name, size in rank.parts.items()},
            microbatch=rank.microbatch * factor,
        )
        for rank in found.ranks
    )
    return replace(found, ranks=tuple(ranks))


def microbatch_seconds(parts: Mapping[str, float]) -> float:
    """Seconds of a rank's microbatches, without idle time and what comes once a step."""
    return sum(seconds for name, seconds in parts.items() if name not in (*ENDS, "bubble"))


def links_of(run: Run, cluster: Cluster) -> dict[str, Any]:
    """What joins the ranks of the communications that a run can measure by themselves, as far as it matters to them."""
    inside = max(cluster.domain, 1)
    between_stages = cluster.gpus // run.parallel.pp
    return {
        "ep": (run.parallel.ep, run.parallel.ep > inside, run.parallel.ep > cluster.per_node),
        "transfer": (between_stages >= inside, between_stages >= cluster.per_node),
    }


def identity(run: Run) -> dict[str, Any]:
    """All of a run that its step's time and memory depend on, but for the accelerator."""
    whole = run.model_dump(mode="json")
    model = {key: value for key, value in whole["model"].items() if key not in ("preset", "from_", "weights")}
    cluster = {key: whole["cluster"][key] for key in ("gpus", "gpus_per_node", "nic_gbit_s")}
    parts = ("batch", "parallel", "precision", "recompute", "offload", "loss", "routing")
    return {
        "model": model,
        "cluster": cluster,
        "seq_len": run.data.seq_len,
        "optimizer": run.optim.name,
        **{key: whole[key] for key in parts},
    }
