"""The layouts that a search looks at: degrees by arithmetic first, so that a run is only made of what can be legal.

tp stays inside what links join (the node, where there is only PCIe), and a rank of cp keeps 256 tokens of a sequence or
more. The microbatch is a power of two; ZeRO 0 is left out, as 1 moves no more and holds less, and 2 where a pipeline or
a single shard makes it 1; 3 holds less even of a single shard, as it gives back the copies to compute with. A degree
that the user's own run has is tried beside these. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from fivefold.config.rule import divisors_of
from fivefold.config.run import RECOMPUTE_MODES, Recompute, RecomputeMode, Run
from fivefold.config.schedules import demands_of
from fivefold.config.split_rules import cuts_sequences, splits_layers
from fivefold.plan.cluster import Cluster

Zero = Literal[0, 1, 2, 3]
FEWEST_TOKENS = 256
"""Of a sequence, on a rank of cp."""
LARGEST_MICRO = 64
"""Sequences of a microbatch."""
CHUNKS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
"""Stages a rank that `interleaved` is tried with."""
SCHEDULES = ("interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
"""Beside 1f1b. `naive` and `gpipe` are never faster; `auto` is a search of its own."""


class Degrees(NamedTuple):
    """A layout but for its schedule."""

    tp: int
    cp: int
    pp: int
    ep: int
    dp: int
    micro: int
    zero: Zero
    mode: RecomputeMode

    @property
    def family(self) -> tuple[int, int, int]:
        """Layouts that differ in cp, the micro-batch, ZeRO, recompute or schedule alone are of one family."""
        return self.tp, self.pp, self.ep

    def microbatches(self, run: Run) -> int:
        """A step's, of one rank."""
        return run.batch.global_size // (self.micro * self.dp)


def degrees(run: Run, cluster: Cluster) -> Iterator[Degrees]:
    """All that divide what they have to divide, of a run whose vocabulary is known."""
    reach = max(cluster.domain if cluster.link else cluster.per_node, run.parallel.tp)
    model, seq_len = run.model, run.data.seq_len
    for tp in divisors_of(cluster.gpus):
        if tp > reach or not splits_layers(run, tp):
            continue
        for pp in divisors_of(cluster.gpus // tp):
            if pp > model.layers:
                break
            for cp in divisors_of(cluster.gpus // (tp * pp)):
                if cp > 1 and (seq_len // cp < FEWEST_TOKENS or not cuts_sequences(run, cp)):
                    continue
                yield from _inside(run, tp, cp, pp, cluster.gpus // (tp * pp * cp))


def _inside(run: Run, tp: int, cp: int, pp: int, dp: int) -> Iterator[Degrees]:
    """The layouts of these degrees: experts, microbatch, ZeRO, recompute."""
    size = run.batch.global_size
    if size % dp:
        return
    micros = [micro for micro in _micros(run) if size // dp % micro == 0]
    micros = [micro for micro in micros if micro * (run.data.seq_len // cp) % tp == 0]
    for ep in _experts(run, dp * cp * tp):
        shards = dp * cp > 1 or dp * cp * tp > ep > 1
        zeros: tuple[Zero, ...] = (1, 3) if pp > 1 or not shards else (1, 2, 3)
        for micro in micros:
            for zero in zeros:
                for mode in RECOMPUTE_MODES:
                    yield Degrees(tp, cp, pp, ep, dp, micro, zero, mode)


def _micros(run: Run) -> list[int]:
    powers = [1 << power for power in range(LARGEST_MICRO.bit_length())]
    return sorted({*powers, max(1, run.batch.micro_size)})


def _experts(run: Run, ranks: int) -> list[int]:
    moe = run.model.moe
    return [1] if moe is None else [ep for ep in divisors_of(moe.experts) if ranks % ep == 0]


def schedules(run: Run, each: Degrees) -> Iterator[tuple[str, int]]:
    """Names and chunks of the pipeline schedules beside 1f1b that have the stages and microbatches they need."""
    microbatches = each.microbatches(run)
    for name, chunks in with_stages(run, each.pp):
        if microbatches >= demands_of(name).fewest(each.pp):
            yield name, chunks


def with_stages(run: Run, pp: int) -> Iterator[tuple[str, int]]:
    """Those of which each stage has a layer; none without a pipeline."""
    if pp == 1:
        return
    most = run.model.layers // pp
    for name in SCHEDULES:
        chunks = demands_of(name).chunks
        wanted = CHUNKS if chunks is None else (chunks,)
        yield from ((name, each) for each in wanted if each <= most)


def run_of(run: Run, each: Degrees, schedule: str = "1f1b", chunks: int = 1) -> Run:
    """The run on this layout: nothing else of it changes."""
    parallel = run.parallel.model_copy(
        update={
            "tp": each.tp,
            "pp": each.pp,
            "cp": each.cp,
            "ep": each.ep,
            "dp": each.dp,
            "replicate": 1,
            "zero": each.zero,
            "schedule": schedule,
            "schedule_memory": None,
            "chunks": chunks,
            "layers_per_stage": "auto",
        }
    )
    batch = run.batch.model_copy(update={"micro_size": each.micro})
    return run.model_copy(update={"parallel": parallel, "batch": batch, "recompute": Recompute(mode=each.mode)})
