"""How long a forward pass takes that no backward follows: prefill, or validation.

The same operations, rates and exchanges as in a training step (`time/layers.py`), their forward alone. A pipeline
passes the microbatches as validation does, in groups of as many as it has ranks. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fivefold.config.run import Run
from fivefold.pipeline.schedule import forward_only
from fivefold.pipeline.simulate import makespan
from fivefold.pipeline.times import Times
from fivefold.plan.cluster import Cluster
from fivefold.plan.constants import constants
from fivefold.plan.software import Software
from fivefold.plan.time.layers import LayerTimes, PassTime
from fivefold.plan.time.pipeline import STEADY
from fivefold.plan.time.step import COMMUNICATION, busiest_rank, stage_placement, stage_work, transfers


@dataclass(frozen=True)
class ForwardTime:
    """A pass over all of the batch's sequences."""

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of the busiest pipeline rank by what they are spent on; they sum to the pass."""
    hidden: float = 0.0
    """Seconds of its communication that computation hides."""
    stages: tuple[float, ...] = ()
    """Seconds of each stage for a microbatch."""
    hop: float = 0.0
    """Seconds of a transfer between neighbouring stages."""

    @property
    def exposed(self) -> float:
        """Seconds in which the busiest rank waits for communication."""
        return sum(self.parts.get(name, 0.0) for name in COMMUNICATION)

    @property
    def communication(self) -> float:
        """Seconds that its communication would take by itself."""
        return self.exposed + self.hidden


def forward_time(run: Run, cluster: Cluster, software: Software, microbatches: int) -> ForwardTime:
    """The pass of a run whose ranks are known, with so many microbatches on the busiest of its shares.

    Raises UserError if the accelerator has no products in the run's format.
    """
    layers = LayerTimes(run, cluster, software, constants())
    placement = stage_placement(run)
    passes = []
    for works in stage_work(run, layers, len(placement)):
        time = PassTime()
        for work, count, _ in works:
            time.add(layers.forward(work), count)
        passes.append(time)
    hop, transfer = transfers(run, layers)
    for each in passes if run.parallel.pp > 1 else ():
        each.forward += transfer / 2
        each.parts["transfer"] = transfer / 2
    stages = tuple(each.forward for each in passes)
    seconds = _pipeline(placement, microbatches, stages, hop)
    busiest, parts, hidden = busiest_rank(passes, placement, microbatches)
    return ForwardTime(seconds, parts | {"bubble": seconds - busiest}, hidden, stages, hop)


def _pipeline(placement: Sequence[int], microbatches: int, stages: tuple[float, ...], hop: float) -> float:
    """Of many microbatches a few groups are simulated; each of the others adds the busiest rank's time."""
    ranks = max(placement) + 1
    if ranks == 1:
        return microbatches * sum(stages)
    few = min(microbatches, STEADY * ranks + microbatches % ranks)
    nothing = (0.0,) * len(stages)
    simulated = makespan(forward_only(tuple(placement), few), Times(stages, nothing, nothing, latency=hop))
    by_rank = [sum(stages[stage] for stage, holder in enumerate(placement) if holder == rank) for rank in range(ranks)]
    return simulated + (microbatches - few) * max(by_rank)
