"""What a layout takes at least, found in microseconds: memory of a middle stage, seconds of a schedule.

They only ever leave out what the whole count would leave out too: of the memory the ends of the model are left away,
of the time the ends of a pipeline that a schedule could fill. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

from fivefold.config.run import Run
from fivefold.model.spec import is_moe, layer_shapes
from fivefold.pipeline.of_run import placement_of_run
from fivefold.pipeline.stages import stage_layers
from fivefold.plan.memory.overhead import overhead_of
from fivefold.plan.memory.shards import NOTHING, Parts, Shards
from fivefold.plan.memory.stage import layers_of
from fivefold.plan.memory.state import state_of
from fivefold.plan.search.space import Degrees, run_of, with_stages
from fivefold.plan.software import Software
from fivefold.plan.time.step import StepTime


def waiting(name: str, ranks: int, microbatches: int, chunks: int, rank: int) -> int:
    """The most activations of one stage that a pipeline rank holds at once, under 1f1b or one of `SCHEDULES`."""
    behind = ranks - rank
    if name == "interleaved":
        return min(microbatches * chunks, (chunks - 1) * _group(ranks, microbatches) + 2 * behind - 1)
    if name == "dualpipe-v":
        return 2 * ranks + 1
    if name == "zb-v":
        return min(microbatches, ranks + behind - 1) + min(microbatches, rank + 1)
    return min(microbatches, 2 * behind - 1 if name == "zb-h2" else behind)


def _group(ranks: int, microbatches: int) -> int:
    """Microbatches that pass a chunk of interleaved together (pipeline/classic.py)."""
    return ceil(microbatches / max(1, microbatches // ranks))


def moments(name: str, ranks: int, microbatches: int, chunks: int, rank: int) -> Iterator[tuple[int, int]]:
    """Moments at which a pipeline rank may be fullest: of how many of its stages the gradients are there, and how many
    activations of one stage it then holds at least.

    Gradients come later than the most activations, and are there beside as many if forwards go on until then. Under
    1f1b and interleaved forwards and backwards take turns, and a group of microbatches comes back through one chunk
    after the other; if there is no other group, a chunk's gradients are gone with it.
    """
    here = waiting(name, ranks, microbatches, chunks, rank)
    yield 0, here
    if name in ("1f1b", "interleaved"):
        group = _group(ranks, microbatches)
        for begun in range(1, 1 + (chunks if microbatches > group else microbatches > 1)):
            back = group * (begun - 1) + 1
            yield begun, min(microbatches * chunks, here + back) - back
        return
    goes_on = microbatches + rank > 2 * ranks if chunks > 1 else microbatches > here
    if goes_on:
        yield chunks, here


class LeastMemory:
    """Bytes that the fullest rank of a layout holds at least. What depends on a few degrees alone is found once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        model = run.model
        self._alike = [is_moe(model, n) == is_moe(model, model.layers - 1) for n in range(model.layers)]
        self._kept: dict[tuple[int | str, ...], _Kept] = {}
        self._state: dict[tuple[int, ...], tuple[float, float]] = {}
        self._splits: dict[tuple[str, int, int], _Split] = {}
        self._fewest: dict[int, _Layers] = {}

    def of(self, each: Degrees, software: Software) -> float:
        """Under any schedule: the state of the layers that a middle rank has, and what waits for its backward."""
        kept, microbatches = self._activations(each, software), each.microbatches(self._run)
        own, here, begun = self._layers(range(self._run.model.layers)), 1, False
        if each.pp > 1:
            own, here = self._middle(each), waiting("1f1b", each.pp, microbatches, 1, _middle(each.pp))
            begun = microbatches >= 2 * each.pp
        state = self._always(each, software, own) + begun * self._begun(each, software, own)
        return state + kept.of(own) * here + kept.working + self._context(each, software)

    def under(self, each: Degrees, software: Software, schedule: str, chunks: int) -> float:
        """Under this schedule, of the layers that the stages really have."""
        kept, microbatches = self._activations(each, software), each.microbatches(self._run)
        most = 0.0
        for rank, stages in enumerate(self._split(each, schedule, chunks)):
            state, one = self._always(each, software, _together(stages)), min(map(kept.of, stages))
            gradients = sorted(self._begun(each, software, stage) for stage in stages)
            for begun, here in moments(schedule, each.pp, microbatches, chunks, rank):
                most = max(most, state + sum(gradients[:begun]) + one * here)
        return most + kept.working + self._context(each, software)

    def _layers(self, numbers: Sequence[int]) -> _Layers:
        alike = sum(self._alike[number] for number in numbers)
        return _Layers(alike, len(numbers) - alike)

    def _split(self, each: Degrees, schedule: str, chunks: int) -> _Split:
        key = schedule, each.pp, chunks
        if key not in self._splits:
            run = run_of(self._run, each, schedule, chunks)
            stages, placement = stage_layers(run), placement_of_run(run)
            self._splits[key] = [
                [self._layers(stages[stage]) for stage, holder in enumerate(placement) if holder == rank]
                for rank in range(each.pp)
            ]
        return self._splits[key]

    def _middle(self, each: Degrees) -> _Layers:
        """The layers of each kind that a middle rank has at least, under any schedule."""
        if each.pp not in self._fewest:
            kinds = [("1f1b", 1), *with_stages(self._run, each.pp)]
            held = [_together(self._split(each, *kind)[_middle(each.pp)]) for kind in kinds]
            self._fewest[each.pp] = _Layers(*map(min, zip(*held, strict=True)))
        return self._fewest[each.pp]

    def _context(self, each: Degrees, software: Software) -> float:
        """Beside the tensors."""
        return overhead_of(run_of(self._run, each), software).context

    def _always(self, each: Degrees, software: Software, held: _Layers) -> float:
        """State of these layers; with a pipeline what is gathered, too."""
        return self._states(each, software, held)[0]

    def _begun(self, each: Degrees, software: Software, held: _Layers) -> float:
        """With a pipeline what comes to that with their gradients."""
        return self._states(each, software, held)[1]

    def _states(self, each: Degrees, software: Software, held: _Layers) -> tuple[float, float]:
        accumulates = each.microbatches(self._run) > 1
        key = each.tp, each.ep, each.dp * each.cp, each.zero, each.pp, accumulates, *held
        if key not in self._state:
            run, model = run_of(self._run, each), self._run.model
            shards, state = Shards(run), state_of(run, software)
            first, last = (shards.of(layer_shapes(model, number)) for number in (0, model.layers - 1))
            parts = Parts([sum([last] * held.alike + [first] * held.others, NOTHING)])
            always = sum(state.always(parts).values())
            without, begun = (sum(state.between(parts, begun, False).values()) for begun in (False, True))
            self._state[key] = (always + without, begun - without) if each.pp > 1 else (always, 0.0)
        return self._state[key]

    def _activations(self, each: Degrees, software: Software) -> _Kept:
        key = each.tp, each.cp, each.ep, each.micro, each.mode
        if key not in self._kept:
            layers = layers_of(run_of(self._run, each), software)
            ends = 0, self._run.model.layers - 1
            first, last = (layers.kept(number) for number in ends)
            self._kept[key] = _Kept(first, last, min(layers.working(number) for number in ends))
        return self._kept[key]


class _Layers(NamedTuple):
    """Numbers of layers."""

    alike: int
    """Like the last one of the model."""
    others: int
    """Like the first one, if that is another kind."""


_Split = list[list[_Layers]]
"""By rank, of each of its stages."""


def _together(stages: Iterable[_Layers]) -> _Layers:
    return _Layers(*map(sum, zip(*stages, strict=True)))


def _middle(ranks: int) -> int:
    """A rank that has many layers and keeps many microbatches: not the first one, which has the embedding."""
    return min(2, ranks - 1)


class _Kept(NamedTuple):
    """Bytes of a microbatch."""

    first: float
    """By the first layer."""
    last: float
    """By the last one."""
    working: float
    """Beside it, in a layer's backward."""

    def of(self, layers: _Layers) -> float:
        """By so many."""
        return self.last * layers.alike + self.first * layers.others


def lightest(each: Degrees) -> Degrees:
    """The layout of its kind with the least to do: recompute adds to a step, ZeRO 2 and 3 take from its end alone."""
    return each._replace(mode="none", zero=1)


def without_end(step: StepTime) -> float:
    """Seconds under 1f1b at least of every layout of the kind whose lightest one takes this step."""
    return step.seconds - step.parts["reduction"]


def least_seconds(plain: StepTime, pp: int, microbatches: int, schedule: str, chunks: int) -> float:
    """Seconds of a step under another schedule at least, by those of the same layout under 1f1b.

    A microbatch goes down and up again, and the busiest rank works for the mean share or more. With one chunk a rank
    works for what it does under 1f1b, and begins when the first microbatch has come down to it; interleaved passes the
    ranks for each chunk.
    """
    mean = sum(map(sum, plain.stages)) / pp
    if schedule == "interleaved":
        return microbatches * mean + (pp - 1) * mean / chunks
    there_and_back = sum(forward + input for forward, input, _ in plain.stages)
    if chunks > 1:
        return max(microbatches * mean, there_and_back)
    arrives, latest = 0.0, there_and_back
    for stage in plain.stages:
        latest = max(latest, arrives + microbatches * sum(stage))
        arrives += stage[0]
    return latest
