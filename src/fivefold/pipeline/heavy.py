"""Which layers keep their activations in CPU memory: all, none, or so many that no rank holds more than the mean.

The blocks of multi-token prediction are layers behind the model's own, and of the last stage.

Early ranks of a pipeline wait longest for backward and keep the most. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from fivefold.config.run import Run
from fivefold.pipeline.memory_balance import peak_bytes
from fivefold.pipeline.of_run import schedule_of_run
from fivefold.pipeline.stage_bytes import ByteCount
from fivefold.pipeline.stages import stage_layers


def offloaded_layers(run: Run) -> list[frozenset[int]]:
    """By stage, the numbers of the layers whose activations are offloaded, of a legal run whose ranks are known.

    With `offload: [heavy-activations]` a rank that would hold more than the mean of all ranks offloads layers until it
    does not, or until none is left: what the head and further predictions keep, and weight gradients that wait, stay.
    Raises UserError while model.vocab is auto.
    """
    if not {"activations", "heavy-activations"} & set(run.offload):
        return [frozenset()] * (run.parallel.pp * run.parallel.chunks)
    stages = stage_layers(run)
    if "activations" in run.offload:
        further = range(run.model.layers, run.model.layers + run.model.mtp)
        return [frozenset(layers) for layers in stages[:-1]] + [frozenset([*stages[-1], *further])]
    schedule, count = schedule_of_run(run), ByteCount(run)
    whole = [
        count.stage(layers, first=stage == 0, last=stage == len(stages) - 1) for stage, layers in enumerate(stages)
    ]
    mean = fmean(peak_bytes(schedule, rank, whole) for rank in range(len(schedule.ranks)))
    offloaded: list[frozenset[int]] = [frozenset()] * len(stages)
    for rank in range(len(schedule.ranks)):
        here = list(whole)
        candidates = ((stage, layer) for stage in schedule.stages_of(rank) for layer in stages[stage])
        while peak_bytes(schedule, rank, here) > mean and (found := next(candidates, None)):
            stage, layer = found
            offloaded[stage] |= {layer}
            here[stage] = replace(here[stage], forward=here[stage].forward - count.kept(layer))
    return offloaded
