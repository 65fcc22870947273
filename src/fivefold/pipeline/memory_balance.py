"""How many layers each stage has if the fullest rank is to be as empty as can be.

A rank's memory is its state and the most activations that its schedule has it hold at once, both in bytes. The order
of a rank's actions decides the latter, whatever they take. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from heapq import heapify, heappop, heappush

from fivefold.config.run import Run
from fivefold.pipeline.memory import levels
from fivefold.pipeline.move_layers import Layers, layers_differ, moved
from fivefold.pipeline.of_run import schedule_of_run
from fivefold.pipeline.schedule import Schedule
from fivefold.pipeline.stage_bytes import ByteCount, StageBytes, sizes_of

NOTHING = StageBytes(0.0, 0.0, 0.0)


def peak_bytes(schedule: Schedule, rank: int, stages: Sequence[StageBytes]) -> float:
    """The most that `rank` holds of activations at once; `stages` are all of the schedule's."""
    sizes = sizes_of(stages)
    return max(level.during for level in levels(schedule.actions[rank], sizes))


def _rank_bytes(schedule: Schedule, rank: int, stages: Sequence[StageBytes]) -> float:
    """State and activations of `rank`; `stages` are its own, and nothing for the others."""
    return sum(stage.state for stage in stages) + peak_bytes(schedule, rank, stages)


def balanced_by_memory(run: Run) -> list[int]:
    """Layers of each stage of a legal run whose ranks are known.

    Each rank begins with a layer a stage, and each further layer goes to the rank that is then the least full: a rank
    is fuller the more layers it has, so the fullest is as empty as it can be. A rank's layers are spread evenly over
    its stages. Of equal choices later ranks come first. Where layers differ this is done with their mean, and then
    layers move. Raises UserError while model.vocab is auto.
    """
    schedule = schedule_of_run(run)
    ranks = [_Rank(run, schedule, rank) for rank in range(len(schedule.ranks))]
    waiting = [(rank.with_one_more(), -number) for number, rank in enumerate(ranks)]
    heapify(waiting)
    for _ in range(run.model.layers - schedule.stages):
        number = -heappop(waiting)[1]
        ranks[number].layers += 1
        heappush(waiting, (ranks[number].with_one_more(), -number))
    counts = [0] * schedule.stages
    for rank in ranks:
        for stage, count in rank.spread(rank.layers).items():
            counts[stage] = count
    return _moved(run, schedule, counts) if layers_differ(run.model) else counts


def _moved(run: Run, schedule: Schedule, counts: list[int]) -> list[int]:
    """Layers that differ move on from where they would be if all were the mean, while a fuller rank gets emptier."""
    count = ByteCount(run)

    @cache
    def load(rank: int, stages: tuple[tuple[int, Layers], ...]) -> float:
        sizes = [NOTHING] * schedule.stages
        for stage, layers in stages:
            sizes[stage] = count.stage_of_kinds(*layers, first=stage == 0, last=stage == schedule.stages - 1)
        return _rank_bytes(schedule, rank, sizes)

    return moved(counts, schedule.placement, run.model, load)


class _Rank:
    """One rank of the pipeline and the number of its layers."""

    def __init__(self, run: Run, schedule: Schedule, rank: int) -> None:
        self.layers = len(schedule.stages_of(rank))
        self._schedule, self._rank = schedule, rank
        self._count = ByteCount(run)

    def spread(self, layers: int) -> dict[int, int]:
        """How many of `layers` each stage of the rank has; the rest is later stages', which keep fewer activations."""
        stages = self._schedule.stages_of(self._rank)
        each, rest = divmod(layers, len(stages))
        return {stage: each + (place >= len(stages) - rest) for place, stage in enumerate(stages)}

    def with_one_more(self) -> float:
        """Bytes of the rank with a layer more than it has."""
        stages = [NOTHING] * self._schedule.stages
        for stage, count in self.spread(self.layers + 1).items():
            stages[stage] = self._count.mean_stage(count, first=stage == 0, last=stage == self._schedule.stages - 1)
        return _rank_bytes(self._schedule, self._rank, stages)
