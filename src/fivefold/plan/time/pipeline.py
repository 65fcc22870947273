"""How long a step's microbatches take on a pipeline: closed forms where they hold, else the simulator.

1F1B: the stages' times together for one microbatch to go down and up again, and the slowest rank once more for every
other one. Interleaved: the slowest rank for all microbatches, and a chunk's time for each rank that waits at the ends.
They are what the simulator says, the second to within a percent. Other schedules are simulated with a few microbatches
for each rank, and the slowest rank's time is added for those left: beyond that point each adds the same. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.pipeline.of_run import named_schedule
from fivefold.pipeline.schedule import Schedule
from fivefold.pipeline.simulate import makespan
from fivefold.pipeline.times import Times

STEADY = 2
"""Microbatches a rank that are simulated of a schedule without a closed form."""


def pipeline_seconds(
    name: str,
    placement: Sequence[int],
    microbatches: int,
    stages: Sequence[tuple[float, float, float]],
    hop: float = 0.0,
    schedule: Schedule | None = None,
) -> float:
    """Seconds from the first forward to the last backward.

    `stages` are forward, input and weight gradient of each stage of `placement`; `hop` is a transfer between
    neighbours. `schedule` is the run's own, if it is no named one.
    """
    ranks = max(placement) + 1
    chunks = len(placement) // ranks
    if ranks == 1:
        return microbatches * sum(map(sum, stages))
    slowest = max(sum(sum(stages[stage]) for stage in range(rank, len(stages), ranks)) for rank in range(ranks))
    if name == "1f1b":
        down_and_up = sum(map(sum, stages)) + 2 * (ranks - 1) * hop
        return down_and_up + (microbatches - 1) * slowest
    if name == "interleaved" and microbatches >= ranks:
        mean = sum(map(sum, stages)) / len(stages) + 2 * hop
        return microbatches * slowest + (ranks - 1) * mean
    by_rank = [0.0] * ranks
    for stage, rank in enumerate(placement):
        by_rank[rank] += sum(stages[stage])
    few = microbatches if schedule is not None else min(microbatches, STEADY * ranks)
    made = schedule or named_schedule(name, ranks, few, chunks)
    forward, input, weight = zip(*stages, strict=True)
    times = Times(forward, input, weight, latency=hop)
    return makespan(made, times) + (microbatches - few) * max(by_rank)
