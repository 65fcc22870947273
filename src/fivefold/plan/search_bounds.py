"""What a layout takes at least, found in microseconds: memory of a middle stage, seconds of a schedule.

They only ever leave out what the whole count would leave out too: of the memory the ends of the model are left away,
of the time the ends of a pipeline that a schedule could fill. Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from fivefold.config.run import Run
from fivefold.model.spec import is_moe, layer_shapes
from fivefold.pipeline.of_run import placement_of_run
from fivefold.pipeline.stages import stage_layers
from fivefold.plan.memory_overhead import overhead_of
from fivefold.plan.memory_shards import NOTHING, Parts, Shards
from fivefold.plan.memory_stage import layers_of
from fivefold.plan.memory_state import state_of
from fivefold.plan.search_space import Degrees, run_of
from fivefold.plan.software import Software
from fivefold.plan.time import StepTime


def waiting(name: str, ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    """Activations of one stage that a pipeline rank holds at once at least, under a schedule of `SCHEDULES`."""
    behind = ranks - rank
    if name == "interleaved":
        warm = (chunks - 1) * ranks + 2 * behind - 1
        return min(microbatches * chunks, warm) if microbatches >= ranks else 1
    if chunks > 1:
        return 2 * ranks if microbatches >= 2 * ranks else min(microbatches, 2 * ranks)
    return min(microbatches, 2 * behind - 1 if name == "zb-h2" else behind)


class LeastMemory:
    """Bytes that the fullest rank of a layout holds at least. What depends on a few degrees alone is found once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        model = run.model
        self._alike = [is_moe(model, n) == is_moe(model, model.layers - 1) for n in range(model.layers)]
        self._kept: dict[tuple[int | str, ...], _Kept] = {}
        self._state: dict[tuple[int, ...], float] = {}

    def of(self, each: Degrees, software: Software) -> float:
        """Under any schedule: a middle stage's state, and what waits for its backward."""
        layers, kept = self._run.model.layers, self._activations(each, software)
        if each.pp == 1:
            others = layers - sum(self._alike)
            activations = kept.last * (layers - others) + kept.first * others
            return self._always(each, software, layers - others, others) + activations + kept.working
        own = layers // each.pp
        here = waiting("1f1b", each.pp, each.microbatches(self._run), 1, min(2, each.pp - 1))
        return self._always(each, software, own, 0) + kept.least * own * here + kept.working

    def under(self, each: Degrees, software: Software, schedule: str, chunks: int) -> float:
        """Under this schedule, of the layers that the stages really have."""
        run = run_of(self._run, each, schedule, chunks)
        kept, stages, placement = self._activations(each, software), stage_layers(run), placement_of_run(run)
        microbatches = each.microbatches(run)
        most = 0.0
        for rank in range(each.pp):
            mine = [stages[stage] for stage, holder in enumerate(placement) if holder == rank]
            alike = sum(self._alike[number] for layers in mine for number in layers)
            others = sum(map(len, mine)) - alike
            smallest = min(
                sum(kept.last if self._alike[number] else kept.first for number in layers) for layers in mine
            )
            here = waiting(schedule, each.pp, microbatches, chunks, rank)
            most = max(most, self._always(each, software, alike, others) + smallest * here)
        return most + kept.working

    def _always(self, each: Degrees, software: Software, alike: int, others: int) -> float:
        """State of so many layers like the last one, and like the first; with a pipeline what is gathered, too."""
        accumulates = each.microbatches(self._run) > 1
        key = each.tp, each.ep, each.dp * each.cp, each.zero, each.pp, accumulates, alike, others
        if key not in self._state:
            run, model = run_of(self._run, each), self._run.model
            shards, state = Shards(run), state_of(run, software)
            first, last = (shards.of(layer_shapes(model, number)) for number in (0, model.layers - 1))
            parts = Parts([sum([last] * alike + [first] * others, NOTHING)])
            bytes = sum(state.always(parts).values())
            if each.pp > 1:
                bytes += sum(state.between(parts, True, False).values())
            self._state[key] = bytes + overhead_of(run, software).context
        return self._state[key]

    def _activations(self, each: Degrees, software: Software) -> _Kept:
        key = each.tp, each.cp, each.ep, each.micro, each.mode
        if key not in self._kept:
            layers = layers_of(run_of(self._run, each), software)
            ends = 0, self._run.model.layers - 1
            first, last = (layers.kept(number) for number in ends)
            self._kept[key] = _Kept(first, last, min(layers.working(number) for number in ends))
        return self._kept[key]


class _Kept(NamedTuple):
    """Bytes of a microbatch."""

    first: float
    """By the first layer."""
    last: float
    """By the last one."""
    working: float
    """Beside it, in a layer's backward."""

    @property
    def least(self) -> float:
        return min(self.first, self.last)


def lightest(each: Degrees) -> Degrees:
    """The layout of its kind with the least to do: recompute adds to a step, ZeRO 2 and 3 take from its end alone."""
    return each._replace(mode="none", zero=1)


def without_end(step: StepTime) -> float:
    """Seconds under 1f1b at least of every layout of the kind whose lightest one takes this step."""
    return step.seconds - step.parts["reduction"]


def least_seconds(plain: StepTime, pp: int, microbatches: int, schedule: str, chunks: int) -> float:
    """Seconds of a step under another schedule at least, by those of the same layout under 1f1b.

    The busiest rank works for the mean share or more. With one chunk a rank works for what it does under 1f1b, and
    begins when the first microbatch has come down to it; interleaved passes the ranks for each chunk.
    """
    mean = sum(map(sum, plain.stages)) / pp
    if schedule == "interleaved":
        return microbatches * mean + (pp - 1) * mean / chunks
    if chunks > 1:
        return microbatches * mean
    latest = arrives = 0.0
    for stage in plain.stages:
        latest = max(latest, arrives + microbatches * sum(stage))
        arrives += stage[0]
    return latest
