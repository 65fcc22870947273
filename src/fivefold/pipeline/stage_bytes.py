"""What a stage takes of a rank's memory, in bytes: its state, which is always there, and what each microbatch adds.

A stage is its layers (`layer_bytes.py`), and at the ends the embedding, the head and what predicts further tokens. The
head keeps the last norm's input and its gradient; its weight's gradient is added up at once. Its logits exist in small
chunks and are left out, as is what a layer that is computed again takes meanwhile: every rank has one such layer.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from fivefold.config.run import Precision, Run
from fivefold.model.spec import vocabulary
from fivefold.pipeline.layer_bytes import BYTES, LayerBytes, LayerCount, total
from fivefold.pipeline.times import Sizes


@dataclass(frozen=True)
class StageBytes:
    """One stage on one of its ranks."""

    state: float
    """Weights, gradients and moments, as they are sharded, with the gathered weights and the unreduced gradients."""
    forward: float
    """Of a microbatch from its F to the end of its I (or B)."""
    weight: float
    """Of a microbatch from I to the end of W."""


def sizes_of(stages: Iterable[StageBytes]) -> Sizes:
    """What the stages hold of a microbatch, in bytes instead of activations."""
    stages = tuple(stages)
    forward, weight = tuple(stage.forward for stage in stages), tuple(stage.weight for stage in stages)
    return Sizes(forward, weight, transient=(0.0,) * len(stages))


class ByteCount:
    """Counts the bytes of a legal run's stages. `stage` raises UserError while model.vocab is auto."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._count = LayerCount(run)

    @cached_property
    def _layers(self) -> list[LayerBytes]:
        return [self._count.layer(number) for number in range(self._run.model.layers)]

    @cached_property
    def _depths(self) -> list[LayerBytes]:
        """What predicts further tokens."""
        return [self._count.depth(number) for number in range(self._run.model.mtp)]

    @cached_property
    def _edge(self) -> float:
        """Parameters of the embedding, or of the head, on one rank of tp."""
        return vocabulary(self._run.model) * self._run.model.hidden / self._run.parallel.tp

    def stage(self, layers: Sequence[int], first: bool, last: bool) -> StageBytes:
        """The stage that has the layers of these numbers; `first` with the embedding, `last` with the head."""
        return self._stage(total(self._layers[number] for number in layers), first, last)

    def mean_stage(self, layers: int, first: bool, last: bool) -> StageBytes:
        """A stage of so many layers, each the mean of the model's."""
        return self._stage(total(self._layers).times(layers / len(self._layers)), first, last)

    def stage_of_kinds(self, dense: int, others: int, first: bool, last: bool) -> StageBytes:
        """A stage of so many of the dense layers in front, each their mean, and of so many of those behind them."""
        moe = self._run.model.moe
        border = moe.dense_layers if moe else 0
        front, behind = self._layers[:border], self._layers[border:]
        layers = [total(front).times(dense / max(1, len(front))), total(behind).times(others / len(behind))]
        return self._stage(total(layers), first, last)

    def kept(self, layer: int) -> float:
        """What layer number `layer` keeps on the device of a microbatch, if it is not offloaded by itself."""
        return self._count.kept(layer)

    def waiting_share(self) -> float:
        """What a layer holds from I to the end of W, as a share of what it holds before, if nothing is offloaded."""
        saved = fmean(map(self._count.saved, range(self._run.model.layers)))
        return fmean(layer.waiting for layer in self._layers) / saved

    def _stage(self, layers: LayerBytes, first: bool, last: bool) -> StageBytes:
        model, tokens = self._run.model, self._count.tokens * self._count.compute
        embedding_norm = tokens * model.hidden * model.embedding_norm
        whole = total([layers, *self._depths]) if last else layers
        return StageBytes(
            state=self._state(
                whole.dense + self._edges(first, last) * self._edge,
                whole.experts,
                copied=self._copies(first, last) * self._edge,
            ),
            forward=whole.kept + (embedding_norm if first else 0.0) + (self._head() if last else 0.0),
            weight=whole.waiting,
        )

    def _edges(self, first: bool, last: bool) -> int:
        """Tables as large as the embedding that a stage owns: it and a head that is not tied to it."""
        return first + (last and not self._run.model.tied)

    def _copies(self, first: bool, last: bool) -> int:
        """Copies of the embedding: in a tied head, or where further tokens are predicted, away from the embedding."""
        return last and not first and (self._run.model.tied or self._run.model.mtp > 0)

    def _head(self) -> float:
        """The last norm's input and the gradient of its output."""
        return 2 * self._count.tokens * self._run.model.hidden * self._count.compute

    def _state(self, dense: float, experts: float, copied: float) -> float:
        """Bytes of so many of a stage's parameters (after tp and ep), with moments but of copies."""
        run, parallel = self._run, self._run.parallel
        assert parallel.dp != "auto", "the ranks are known"
        shards = 1 if parallel.zero == 0 else parallel.dp // parallel.replicate * parallel.cp
        replicas = 1 if parallel.zero == 0 else parallel.dp * parallel.cp * parallel.tp / parallel.ep
        master, reduce = master_bytes(run.precision), reduce_bytes(run.precision)
        here = 0 if "parameters" in run.offload else 2
        moments = 0 if "optimizer" in run.offload else 2
        elements = dense + experts + copied
        gathered = min(elements, self._largest) if parallel.zero == 3 else elements
        sharded = dense / shards + experts / replicas
        held = (sharded * (here + moments) + copied / shards * here) * master
        return held + gathered * self._count.compute + elements * reduce

    @cached_property
    def _largest(self) -> float:
        """Parameters of the largest unit that is gathered at a time: a layer with its experts, or an edge."""
        return max(self._edge, *(layer.dense + layer.experts for layer in [*self._layers, *self._depths]))


def master_bytes(precision: Precision) -> int:
    """Bytes of a weight as it is kept, and of each of its moments."""
    if precision.master != "auto":
        return BYTES[precision.master]
    return BYTES["fp64"] if precision.compute == "fp64" else BYTES["fp32"]


def reduce_bytes(precision: Precision) -> int:
    """Bytes of a gradient before it is reduced."""
    return master_bytes(precision) if precision.reduce == "auto" else BYTES[precision.reduce]
