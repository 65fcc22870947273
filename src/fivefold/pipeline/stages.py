"""Which layers each pipeline stage has: as the run file says, balanced by memory (memory_balance.py), or by cost.

By cost, the most expensive stage is as cheap as can be. The cost of a layer is its weights that multiply each token, to
which its time and its memory are proportional, and the head costs its weights too. So does the embedding, though it is
a lookup: its weights, gradients and optimizer state take the memory that the head's take, on the stage that keeps the
most activations. Attention's own products are left out, so that the stages depend on the model alone and not on
data.seq_len. Imports no torch.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise

from fivefold.config.run import Model, Run
from fivefold.model.spec import matmul_parameters, vocabulary
from fivefold.pipeline.memory_balance import balanced_by_memory


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
    return balanced_by_memory(run) if wanted == "memory" else _balanced_by_cost(run.model, stages)


def _balanced_by_cost(model: Model, stages: int) -> list[int]:
    """How many layers each stage has: one, and each further one goes to the stage that is then the cheapest.

    Layers cost the same, so this makes the most expensive stage as cheap as it can be, and the sum of the squared costs
    as small (a convex cost is minimized by taking the cheapest step each time). Of equal choices the first and the
    last stage come last, as they have more than layers; before them later stages, which keep fewer activations.
    """
    edge = vocabulary(model) * model.hidden
    layer = (matmul_parameters(model) - edge) // model.layers
    counts = [1] * stages
    ends = (0, stages - 1)
    waiting = [(2 * layer + (edge if stage in ends else 0), stage in ends, -stage) for stage in range(stages)]
    heapify(waiting)
    for _ in range(model.layers - stages):
        cost, is_end, negative = heappop(waiting)
        counts[-negative] += 1
        heappush(waiting, (cost + layer, is_end, negative))
    return counts
