"""Which layers each pipeline stage has: as the run file says, balanced by memory (memory_balance.py), or by cost.

By cost, the busiest rank has as little to do as can be, all its stages together: it works on one while another waits.
A layer costs its weights that multiply a token, to which its time is proportional: of experts those that a token is
sent to. The head costs its weights too, and so does each depth of multi-token prediction, which is behind it and has
the head once more. The embedding is a lookup, but its gradient is a whole table that is added up. Attention's own
products are left out, so that the stages depend on the model and the schedule, and not on data.seq_len. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple

from fivefold.config.run import Model, Run
from fivefold.model.spec import layer_matmul_parameters, mtp_matmul_parameters, vocabulary
from fivefold.pipeline.memory_balance import balanced_by_memory
from fivefold.pipeline.move_layers import layers_differ, moved
from fivefold.pipeline.of_run import placement_of_run

EMBEDDING = 1 / 8
"""What the embedding costs, as a share of what the head does: their times on an H200 with 4,096 tokens a microbatch."""


class _Load(NamedTuple):
    """What a rank or a stage has to do, in order of which gets the next layer."""

    cost: float
    """Sums of whole numbers and eighths, so that they are exact and equal costs compare as equal."""
    at_an_end: bool
    """Whether it is, or has, the first or the last stage."""


def stage_layers(run: Run) -> list[range]:
    """The numbers of the layers of each of pp x chunks stages, of a legal run.

    To be balanced by memory its ranks must be known. Raises UserError if the stages are to be balanced while
    model.vocab is auto, or while the schedule is a file that cannot be read.
    """
    return [range(first, end) for first, end in pairwise(accumulate(_counts(run), initial=0))]


def _counts(run: Run) -> list[int]:
    stages, wanted = run.parallel.pp * run.parallel.chunks, run.parallel.layers_per_stage
    if isinstance(wanted, list):
        return wanted
    if stages == 1:
        return [run.model.layers]
    if wanted == "memory":
        return balanced_by_memory(run)
    return list(_balanced_by_cost(_Costs(run.model), placement_of_run(run)))


class _Costs:
    """A model as a key; one that is equal is found too."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Costs) and (self.model is other.model or self.model == other.model)

    def __hash__(self) -> int:
        return hash((self.model.layers, self.model.hidden, self.model.vocab))


@lru_cache(maxsize=1024)
def _balanced_by_cost(costs: _Costs, placement: tuple[int, ...]) -> Sequence[int]:
    """How many layers each stage has if the busiest rank is to have as little to do as can be; found once for all runs.

    `placement` says which rank has each stage. Every stage has a layer; the others are shared out to the ranks, and
    those of a rank to its stages. Where layers differ this is done as if all were as the last, and then layers move.
    """
    model = costs.model
    head = vocabulary(model) * model.hidden
    first, layer = (layer_matmul_parameters(model, number) for number in (0, model.layers - 1))
    ends = [0.0] * len(placement)
    ends[0] += EMBEDDING * head
    ends[-1] += head + mtp_matmul_parameters(model)

    def load(*stages: int) -> _Load:
        cost = sum(ends[stage] + layer for stage in stages)
        return _Load(cost, any(stage in (0, len(placement) - 1) for stage in stages))

    ranks = [[stage for stage, holder in enumerate(placement) if holder == rank] for rank in sorted(set(placement))]
    counts = [1] * len(placement)
    further = _shared_out(model.layers - len(placement), layer, [load(*stages) for stages in ranks])
    for stages, layers in zip(ranks, further, strict=True):
        for stage, more in zip(stages, _shared_out(layers, layer, [load(stage) for stage in stages]), strict=True):
            counts[stage] += more
    if not layers_differ(model):
        return counts
    return moved(
        counts,
        placement,
        model,
        lambda _, stages: sum(ends[stage] + dense * first + others * layer for stage, (dense, others) in stages),
    )


def _shared_out(layers: int, cost: int, loads: Sequence[_Load]) -> list[int]:
    """How many of `layers`, of which each costs `cost`, go to each of the loads: the next one to that which is least.

    So the greatest load is as small as it can be, and the sum of the squares too (a convex cost is minimized by taking
    the cheapest step each time). Of equal loads those at an end come last, as they have more than layers; before them
    later ones, which keep fewer activations.
    """
    counts = [0] * len(loads)
    waiting = [(*load, -number) for number, load in enumerate(loads)]
    heapify(waiting)
    for _ in range(layers):
        least, at_an_end, negative = waiting[0]
        counts[-negative] += 1
        heapreplace(waiting, (least + cost, at_an_end, negative))
    return counts
