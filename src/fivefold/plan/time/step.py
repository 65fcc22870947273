"""How long an optimizer step of a run takes on a cluster, and where the time goes.

Each stage's microbatch is timed by its operations and communications (`layers.py`), the pipeline by its schedule
(`pipeline.py`); the end of the step adds what is left of the reduction of gradients and of the gathering of
parameters, and the optimizer. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fivefold.config.run import Run
from fivefold.config.schedules import is_file
from fivefold.pipeline.of_run import microbatches_of, placement_of_run, schedule_of_run
from fivefold.pipeline.stages import stage_layers
from fivefold.plan.cluster import Cluster, cluster_of
from fivefold.plan.constants import Constants, constants
from fivefold.plan.software import Software, fivefold, in_formats
from fivefold.plan.time.formats import product_format
from fivefold.plan.time.layers import LayerTimes, PassTime
from fivefold.plan.time.network import Group
from fivefold.plan.time.offload import add_activations, update_seconds
from fivefold.plan.time.pipeline import pipeline_seconds
from fivefold.plan.time.work import Work, stage_works


@dataclass(frozen=True)
class StepTime:
    """An optimizer step."""

    seconds: float
    tokens_per_s: float
    """Of the whole cluster."""
    mfu: float
    """By the convention of `model/spec.py`: FLOPs of the model, attention causal, over the dense peak of the format of
    the linear layers."""
    bubble: float
    """Share of the step in which the busiest pipeline rank waits."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of the busiest rank by what they are spent on; they sum to the step."""
    communication: float = 0.0
    """Share of the step that the busiest rank's communication would take by itself."""
    exposed: float = 0.0
    """Share of the step in which it waits for communication."""
    stages: tuple[tuple[float, float, float], ...] = ()
    """Seconds of each stage's forward, input and weight gradient of a microbatch."""
    hop: float = 0.0
    """Seconds of a transfer between neighbouring stages."""


COMMUNICATION = ("tp", "cp", "ep", "zero", "transfer", "reduction")
"""The parts that are communication."""


def step_time(
    run: Run,
    cluster: Cluster | None = None,
    software: Software | None = None,
    table: Constants | None = None,
) -> StepTime:
    """The step of a run whose replicas are known; by default on the run's cluster and under this project's software.

    Raises UserError if the accelerator has no products in the run's format, or as `cluster_of` does.
    """
    cluster = cluster_of(run) if cluster is None else cluster
    parallel = run.parallel
    software = fivefold(parallel.zero, parallel.pp) if software is None else software
    software = in_formats(software, run.precision)
    layers = LayerTimes(run, cluster, software, constants() if table is None else table)
    microbatches = microbatches_of(run)
    own = schedule_of_run(run) if parallel.pp > 1 and is_file(parallel.schedule) else None
    placement = stage_placement(run)
    works = stage_work(run, layers, len(placement))
    passes = [_stage_time(run, layers, stage) for stage in works]
    add_activations(run, cluster, passes)
    hop, transfer = transfers(run, layers)
    for each in passes if parallel.pp > 1 else ():
        each.forward += transfer / 2
        each.input += transfer / 2
        each.parts["transfer"] = transfer
    seconds = [(each.forward, each.input, each.weight) for each in passes]
    pipeline = pipeline_seconds(parallel.schedule, placement, microbatches, seconds, hop, own)
    busiest, parts, hidden = busiest_rank(passes, placement, microbatches)
    ends = _ends(run, cluster, layers, software, works, placement, passes)
    total = pipeline + sum(ends.values())
    parts |= {"bubble": pipeline - busiest} | ends
    flops = sum(work.flops * count for stage in works for work, count, _ in stage) * parallel.tp * parallel.cp
    return _step(run, cluster, total, parts, hidden, tuple(seconds), hop, flops / run.batch.micro_size)


def stage_placement(run: Run) -> tuple[int, ...]:
    """Which pipeline rank has each stage. Raises UserError if the schedule is a file that cannot be read."""
    return (0,) if run.parallel.pp == 1 else placement_of_run(run)


def _step(
    run: Run,
    cluster: Cluster,
    total: float,
    parts: dict[str, float],
    hidden: float,
    stages: tuple[tuple[float, float, float], ...],
    hop: float,
    flops: float,
) -> StepTime:
    """`flops` are those of one sequence's forward."""
    tokens = run.batch.global_size * run.data.seq_len
    peak = cluster.accelerator.peak_of(product_format(run)) * cluster.gpus
    exposed = sum(parts.get(name, 0.0) for name in COMMUNICATION)
    return StepTime(
        seconds=total,
        tokens_per_s=tokens / total,
        mfu=3 * flops * run.batch.global_size / (total * peak),
        bubble=parts["bubble"] / total,
        parts=parts,
        communication=(exposed + hidden) / total,
        exposed=exposed / total,
        stages=stages,
        hop=hop,
    )


def stage_work(run: Run, layers: LayerTimes, stages: int) -> list[list[tuple[Work, float, str]]]:
    """By stage its works, how often each comes, and how its layers are recomputed."""
    mode, every = run.recompute.mode, run.recompute.every
    found: list[list[tuple[Work, float, str]]] = []
    for stage, own in enumerate(stage_layers(run)):
        works = stage_works(layers.sizes, own, first=stage == 0, last=stage == stages - 1)
        again = sum(number % every == 0 for number in own)
        found.append(_with_modes(works, mode, again / max(1, len(own))))
    return found


def _with_modes(works: Sequence[tuple[Work, int]], mode: str, share: float) -> list[tuple[Work, float, str]]:
    """The ends are never computed again; of the layers the share that the run says."""
    found: list[tuple[Work, float, str]] = []
    for work, count in works:
        is_layer = any(operation.name == "ffn_residual" for operation in work.operations)
        if mode == "none" or not is_layer:
            found.append((work, count, "none"))
            continue
        found.append((work, count * share, mode))
        if share < 1:
            found.append((work, count * (1 - share), "none"))
    return found


def _stage_time(run: Run, layers: LayerTimes, works: Sequence[tuple[Work, float, str]]) -> PassTime:
    time = PassTime()
    for work, count, mode in works:
        time.add(layers.of(work, mode), count)
    return time


def transfers(run: Run, layers: LayerTimes) -> tuple[float, float]:
    """Seconds of one transfer between stages, and what all of a stage's transfers add to a microbatch.

    A rank receives and sends in forward and in backward; where kernels overlap, part of that hides.
    """
    parallel = run.parallel
    if parallel.pp == 1:
        return 0.0, 0.0
    sizes, software = layers.sizes, layers.software
    bytes = sizes.tokens * run.model.hidden * sizes.width
    hop = layers.seconds("send", bytes if software.whole_transfers else bytes / sizes.tp, layers.groups.pp)
    if software.whole_transfers:
        return hop, 4 * hop
    return hop, 2 * hop * (1 - layers.rates.generation.overlap)


def busiest_rank(
    passes: Sequence[PassTime], placement: Sequence[int], microbatches: int
) -> tuple[float, dict[str, float], float]:
    """Seconds of the rank with the most to do, by part, and those of communication that it hides."""
    ranks: dict[int, PassTime] = {}
    for stage, rank in enumerate(placement):
        ranks.setdefault(rank, PassTime()).add(passes[stage])
    busiest = max(ranks.values(), key=lambda each: each.total)
    parts = {name: seconds * microbatches for name, seconds in busiest.parts.items()}
    return busiest.total * microbatches, parts, busiest.hidden * microbatches


def _ends(
    run: Run,
    cluster: Cluster,
    layers: LayerTimes,
    software: Software,
    works: Sequence[Sequence[tuple[Work, float, str]]],
    placement: Sequence[int],
    passes: Sequence[PassTime],
) -> dict[str, float]:
    """What the end of a step adds on the rank with the most parameters: reduction, gathering, optimizer."""
    parallel = run.parallel
    dense, experts = [0.0] * (max(placement) + 1), [0.0] * (max(placement) + 1)
    for stage, rank in enumerate(placement):
        dense[rank] += sum(work.parameters * count for work, count, _ in works[stage])
        experts[rank] += sum(work.experts * count for work, count, _ in works[stage])
    rank = max(range(len(dense)), key=lambda each: dense[each] + experts[each])
    zero, groups, state = parallel.zero, layers.groups, software.state
    reduction = 0.0
    reduced_before = zero >= 2 and software.reduces_each_microbatch and parallel.pp == 1
    for held, shard, copies in (
        (dense[rank], groups.shard, groups.replicate),
        (experts[rank], groups.expert_shard, Group(1)),
    ):
        gradients = held * state.gradients
        if zero == 0:
            every = Group(shard.size * copies.size, shard.stride)
            reduction += layers.seconds("all-reduce", gradients, every)
        else:
            if not reduced_before:
                reduction += layers.seconds("reduce-scatter", gradients, shard)
            reduction += layers.seconds("all-reduce", gradients / shard.size, copies)  # once a step, like the update
        if zero in (1, 2):
            reduction += layers.seconds("all-gather", held * layers.sizes.width, shard)
    window = _window(parallel.pp, parallel.chunks, passes) if software.overlaps_gradients else 0.0
    left = layers.exposed(reduction, window, software.overlaps_gradients)
    shards = groups.shard.size if zero else 1
    expert_shards = groups.expert_shard.size if zero else 1
    updated = dense[rank] / shards + experts[rank] / expert_shards
    moved = updated * (2 * state.optimizer + 2 * state.gradients + layers.sizes.width)
    in_cpu_memory = update_seconds(run, cluster, updated)
    return {"reduction": left, "optimizer": layers.rates.moving(moved) if in_cpu_memory is None else in_cpu_memory}


def _window(ranks: int, chunks: int, passes: Sequence[PassTime]) -> float:
    """Seconds of computation that reductions and gatherings can run beside: a stage's pass of one microbatch.

    With several chunks all but one can be reduced, and gathered, while a group of microbatches passes another.
    """
    stage = max(each.total for each in passes)
    return stage * (1 + ranks * (chunks - 1))
