"""Which layers each pipeline stage has: as the run file says, balanced by memory (memory_balance.py), or by cost.

By cost, the rank with the most to do has as little to do as can be. The cost of a layer is its weights that multiply
each token, to which its time is proportional, and the head costs its weights too. The embedding is a lookup, but its
gradient is a whole table that is added up: it takes an eighth of the head's time (on an H200, at 4,096 tokens a
microbatch). Attention's own products are left out, so that the stages depend on the model alone and not on
data.seq_len. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise

from fivefold.config.run import Model, Run
from fivefold.model.spec import matmul_parameters, vocabulary
from fivefold.pipeline.memory_balance import balanced_by_memory
from fivefold.pipeline.of_run import placement_of_run

LOOKUP = 8
"""How many times less than the head's the embedding's time is."""


def stage_layers(run: Run) -> list[range]:
    """The numbers of the layers of each of pp x chunks stages, of a legal run.

    To be balanced by memory its ranks must be known. Raises UserError if the stages are to be balanced while
    model.vocab is auto.
    """
    return [range(first, end) for first, end in pairwise(accumulate(_counts(run), initial=0))]


def _counts(run: Run) -> list[int]:
    stages, wanted = run.parallel.pp * run.parallel.chunks, run.parallel.layers_per_stage
    if isinstance(wanted, list):
        return wanted
    if stages == 1:
        return [run.model.layers]
    return balanced_by_memory(run) if wanted == "memory" else _balanced_by_cost(run.model, placement_of_run(run))


def _balanced_by_cost(model: Model, placement: Sequence[int]) -> list[int]:
    """How many layers each stage has: one, and each further one goes to the rank that then has the least to do.

    Layers cost the same, so this makes the busiest rank as little busy as it can be, and the sum of the squared costs
    as small (a convex cost is minimized by taking the cheapest step each time). Of a rank's stages the cheapest gets
    the layer. Of equal choices the first and the last stage come last, as they have more than layers; before them later
    stages, which keep fewer activations.
    """
    head = vocabulary(model) * model.hidden
    layer = (matmul_parameters(model) - head) // model.layers
    stages = len(placement)
    cost = [layer * LOOKUP for _ in range(stages)]  # in units of which the embedding costs a whole number
    cost[0] += head
    cost[-1] += head * LOOKUP
    counts = [1] * stages
    busy = [
        sum(cost[stage] for stage in range(stages) if placement[stage] == rank) for rank in range(max(placement) + 1)
    ]

    def choice(rank: int) -> tuple[int, bool, int, int]:
        stage = min(
            (stage for stage in range(stages) if placement[stage] == rank),
            key=lambda stage: (cost[stage], stage in (0, stages - 1), -stage),
        )
        return busy[rank], stage in (0, stages - 1), -stage, rank

    waiting = [choice(rank) for rank in range(len(busy))]
    heapify(waiting)
    for _ in range(model.layers - stages):
        _, _, negative, rank = heappop(waiting)
        counts[-negative] += 1
        cost[-negative] += layer * LOOKUP
        busy[rank] += layer * LOOKUP
        heappush(waiting, choice(rank))
    return counts
