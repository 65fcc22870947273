"""The memory of a forward pass on each pipeline rank: weights, keys and values, and what one layer works with.

There is no backward: no gradient, no optimizer, no master weights, and a layer's activations are gone when the next one
has its input. Weights are in the format in which they are multiplied: those of linear layers in that of
`precision.linear`, others in `precision.compute`. With ZeRO 3 a rank keeps its piece of them, and gathers two units at
a time. Keys and values of all tokens stay, as a prefill leaves them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fivefold.config.run import Run
from fivefold.model.spec import Shapes, is_moe, layer_shapes, vocabulary
from fivefold.pipeline.layer_bytes import BYTES
from fivefold.pipeline.stages import stage_layers
from fivefold.plan.cluster import Cluster
from fivefold.plan.memory.overhead import GIB, Overhead, overhead_of
from fivefold.plan.memory.own_layers import CHUNK
from fivefold.plan.memory.readings import Filled, Readings
from fivefold.plan.memory.shards import Held, Shards
from fivefold.plan.memory.stage import Stages
from fivefold.plan.software import UNFUSED, Software
from fivefold.plan.time.step import stage_placement

LINEAR = {"fp8-block": 1.0, "fp8-tensor": 1.0, "fp4": 0.5}
"""Bytes of a weight in the formats of `precision.linear` that are not the compute format; scales are left out."""
NOT_LINEAR = ("router.weight",)
"""Matrices of a layer that are never in a narrower format."""
FORWARD_CATEGORIES = {
    "weights": "in the format in which they are multiplied; with ZeRO 3 this rank's pieces",
    "gathered_weights": "with ZeRO 3: whole weights of two units at a time",
    "keys_and_values": "of all tokens of the rank's sequences, in all its layers",
    "working": "one layer's input and output, and the largest tensors between them",
    "logits": "of a chunk of tokens, in the compute format and in fp32",
    "communication": "keys and values that come from other ranks of cp, and messages between stages",
}
"""What each category is, in the order in which they are shown."""


@dataclass(frozen=True)
class ForwardRank(Readings):
    """What a pipeline rank holds at most, in bytes."""

    categories: ClassVar = FORWARD_CATEGORIES
    pp: int
    stages: tuple[int, ...]
    parts: dict[str, float]
    """By category."""
    overhead: Overhead
    capacity: float
    """Of the accelerator."""


@dataclass(frozen=True)
class ForwardMemory(Filled[ForwardRank]):
    """What the ranks of a forward pass hold."""

    ranks: tuple[ForwardRank, ...]
    """By pipeline rank."""
    capacity: float

    def explanation(self) -> Iterator[str]:
        """Each figure of the fullest rank with what it is."""
        worst = self.worst
        for name, meaning in FORWARD_CATEGORIES.items():
            if size := worst.parts.get(name, 0.0):
                yield f"{name.replace('_', ' ')} {size / GIB:.2f} GiB: {meaning}"
        yield f"allocated {worst.allocated / GIB:.2f} GiB: their sum, on pipeline rank {worst.pp}"
        yield from worst.readings()


def forward_memory(run: Run, cluster: Cluster, software: Software, sequences: int) -> ForwardMemory:
    """The memory of a pass of a run whose ranks are known, with so many sequences on the busiest of its shares."""
    count, overhead, layers = _Count(run, software, sequences), overhead_of(run, software), stage_layers(run)
    placement, capacity = stage_placement(run), cluster.accelerator.memory
    ranks = []
    for rank in range(run.parallel.pp):
        stages = tuple(stage for stage, holder in enumerate(placement) if holder == rank)
        numbers = [number for stage in stages for number in layers[stage]]
        last = len(placement) - 1 in stages
        parts = count.weights([(layers[stage], stage == 0, stage == len(placement) - 1) for stage in stages])
        parts["keys_and_values"] = sum(map(count.keys_and_values, numbers))
        logits = count.logits() if last else 0.0
        working = max(map(count.working, numbers), default=0.0)
        parts |= {"logits": logits} if logits > working else {"working": working}
        parts["communication"] = count.blocks() + (2 * count.stream() if run.parallel.pp > 1 else 0.0)
        ranks.append(ForwardRank(rank, stages, parts, overhead, capacity))
    return ForwardMemory(tuple(ranks), capacity)


class _Count:
    """Counts bytes on one rank."""

    def __init__(self, run: Run, software: Software, sequences: int) -> None:
        parallel = run.parallel
        self._model, self._parallel, self._software = run.model, parallel, software
        self._stages, self._shards = Stages(run, software), Shards(run)
        self._width = BYTES[run.precision.compute]
        self._linear = LINEAR.get(run.precision.linear, self._width)
        self._seq_len, self._sequences = run.data.seq_len, sequences
        self._tokens = run.batch.micro_size * run.data.seq_len / parallel.cp
        between = software.sequence_parallel or parallel.tp == 1
        self._between = self._tokens / parallel.tp if between else self._tokens
        self._gathers = parallel.zero == 3 and self._shards.dense > 1

    def weights(self, stages: list[tuple[range, bool, bool]]) -> dict[str, float]:
        """Of stages, each by its layers, and whether it is the first and the last."""
        whole, pieces, most = 0.0, 0.0, 0.0
        for layers, first, last in stages:
            units = [self._unit(held, number) for held, number in self._units(layers, first, last)]
            whole += sum(unit for unit, _ in units)
            pieces += sum(piece for _, piece in units)
            pairs = zip(units, [*units[1:], (0.0, 0.0)], strict=True)
            most = max(most, *(one + other for (one, _), (other, _) in pairs))
        return {"weights": pieces, "gathered_weights": most} if self._gathers else {"weights": whole}

    def _units(self, layers: range, first: bool, last: bool) -> Iterator[tuple[Held, int | None]]:
        """What each unit has of the parameters, and its number if it is a layer."""
        units = self._stages.stage(layers, first, last).units
        numbers = [*([None] if first else []), *layers, *([None] if last else [])]
        return zip((unit.held for unit in units), numbers, strict=True)

    def _unit(self, held: Held, number: int | None) -> tuple[float, float]:
        """Bytes of a unit's weights: whole, and this rank's piece."""
        linear = Held() if number is None else self._shards.of(_linear(layer_shapes(self._model, number)))
        saved = self._width - self._linear
        return held.whole * self._width - linear.whole * saved, held.piece * self._width - linear.piece * saved

    def keys_and_values(self, number: int) -> float:
        """That a layer leaves of all sequences: latent ones whole on each rank of tp, of a window its tokens alone."""
        return self._sequences * self._kept_tokens(number) / self._parallel.cp * self._a_token()

    def _a_token(self) -> float:
        model, mla = self._model, self._model.mla
        if mla is not None:
            return (mla.kv_rank + mla.rotated) * self._width
        return 2 * max(model.key_value_heads / self._parallel.tp, 1) * model.head_size * self._width

    def _kept_tokens(self, number: int) -> int:
        window, every = self._model.options.get("sliding_window"), int(self._model.options.get("sliding_every", 1))
        return self._seq_len if window is None or number % every else min(self._seq_len, int(window))

    def stream(self) -> float:
        """The tokens between two layers."""
        return self._between * self._model.hidden * self._width

    def working(self, number: int) -> float:
        """A layer's input and output, with the larger of what attention and the feed-forward have at a time."""
        ffn = self._mixture() if is_moe(self._model, number) else self._dense(self._model.ffn)
        return 2 * self.stream() + max(self._attention(), ffn) * self._width

    def _attention(self) -> float:
        """Numbers: the gathered input, queries, keys, values and the output; of latent attention keys for each head."""
        model, mla, tp = self._model, self._model.mla, self._parallel.tp
        if mla is None:
            columns = 2 * (model.heads + max(model.key_value_heads, tp)) * model.head_size / tp
        else:
            columns = model.heads / tp * (2 * (mla.plain + mla.rotated) + 2 * mla.value)
        scores = 2 * self._seq_len * model.heads / tp if self._software.generation == UNFUSED else 0.0
        return self._gathered() + self._tokens * (columns + scores)

    def _dense(self, ffn: float) -> float:
        """Numbers: the gathered input, the first product's output, what the activation makes of it."""
        gates = 2 if self._model.activation == "swiglu" else 1
        return self._gathered() + self._tokens * (gates + 1) * ffn / self._parallel.tp

    def _mixture(self) -> float:
        """Numbers: rows that are sent and that arrive, the experts' first product, and the shared experts'."""
        model, moe = self._model, self._model.moe
        assert moe is not None, "the layer has experts"
        sent = self._tokens / self._parallel.tp * moe.top_k
        got = sent * self._software.hot_experts
        shared = self._dense(moe.ffn * moe.shared) if moe.shared else 0.0
        return (sent + got) * model.hidden + got * 3 * moe.ffn + shared

    def _gathered(self) -> float:
        return self._tokens * self._model.hidden if self._parallel.tp > 1 else 0.0

    def blocks(self) -> float:
        """Of one layer: the ring has the block that it reads and the one that comes, other ways the whole sequence."""
        if self._parallel.cp == 1:
            return 0.0
        parts = 2 if self._parallel.cp_method == "ring" else self._parallel.cp
        model, mla, tp = self._model, self._model.mla, self._parallel.tp
        if mla is None:
            return self._tokens * parts * self._a_token()
        return self._tokens * parts * model.heads / tp * (mla.plain + mla.rotated + mla.value) * self._width

    def logits(self) -> float:
        """Of a chunk of tokens, with what tp gathers of their states."""
        tokens = min(CHUNK, self._tokens)
        gathered = self._gathered() * self._width
        return tokens * vocabulary(self._model) / self._parallel.tp * (self._width + max(4, self._width)) + gathered


def _linear(shapes: Shapes) -> Shapes:
    """The matrices of a layer that are in the format of `precision.linear`."""
    return {name: shape for name, shape in shapes.items() if len(shape) > 1 and not name.endswith(NOT_LINEAR)}
