"""What one layer takes of a rank's memory: its parameters there, and what it keeps of each token for backward.

Activations are counted as the model's functions save them on a GPU, each tensor once, in the compute format ("wide": in
at least fp32). With width d, query heads h and key/value heads g of size e, and feed-forward width f, a layer keeps for
each token of its rank

    everything            4 d + attention + feed-forward           block input, two norms, the sum between
    selective recompute   2 d + attention + feed-forward           block input, update of attention
    full recompute        d                                        block input

    attention             (2 h + 2 g) e and a wide number a head   q, k, v, output; log-sum-exp; the norm of queries and
                                                                   keys as much again beside everything
    latent attention      short vectors before and after their norms, q, k, v as wide as k, and the output before and
                          after it is cut; selective: short vectors before, the products that q, k, v are made of
    dense feed-forward    3 f, selective 2 f                       gate and up, their product (gelu: 2 f, f)
    mixture, k choices    2 f k, 3 or 2 f shared                   gate and up of each choice, and as wide numbers the
                                                                   scores and gates, with the places of the choices;
                                                                   with ep the tokens that arrive too, as many d as a
                                                                   token reaches ranks, if as many come as go: an
                                                                   uneven load keeps more on some ranks

Weight gradients that wait hold the inputs and output gradients of the products, those behind tp's sums on all its
tokens; experts one input a token, or with ep one that arrives. What two products have as input is kept once. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from fivefold.config.run import Experts, LatentAttention, Run
from fivefold.model.reach import tokens_arriving
from fivefold.model.spec import EXPERTS, Shapes, is_moe, layer_shapes, mtp_shapes

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
INDEX = 8
"""Bytes of a place among tokens or rows."""
ROW_LAYERS = ("output.weight", "down.weight")
"""The matrices whose columns tp cuts."""
WHOLE = ("router.weight", "q_a.weight", "kv_a.weight", "project.weight")
"""The matrices that every rank of tp has whole."""
SAME_INPUT = ("kv_a.weight", "shared.gate_up.weight")
"""The matrices whose input is that of another: of the queries' first one, and of the experts."""
WITHOUT_DEFERRAL = ("router.weight",)
"""The matrices whose gradients never wait."""

AROUND = {"none": 6, "selective": 4, "full": 2, "offloaded": 1}
"""Of a depth of multi-token prediction, what it keeps of a token beside its block, in widths: the gradient of the
head's input; the state and the embedding that it is given; the last norm's input; the projection's input, of two."""


@dataclass(frozen=True)
class LayerBytes:
    """A layer, or several, on one rank. Parameters are what tp and ep leave of them, in elements; the rest in bytes."""

    dense: float
    """Parameters whose shards are those of all ranks of a stage that hold the same."""
    experts: float
    """Parameters of the rank's routed experts, whose replicas are all others."""
    kept: float
    """What it keeps of a microbatch, if it is not offloaded."""
    waiting: float
    """What its weight gradients hold of a microbatch while they wait."""

    def times(self, factor: float) -> LayerBytes:
        """So many times this."""
        return LayerBytes(self.dense * factor, self.experts * factor, self.kept * factor, self.waiting * factor)


def total(layers: Iterable[LayerBytes]) -> LayerBytes:
    """Several layers together."""
    layers = tuple(layers)
    return LayerBytes(
        dense=sum(layer.dense for layer in layers),
        experts=sum(layer.experts for layer in layers),
        kept=sum(layer.kept for layer in layers),
        waiting=sum(layer.waiting for layer in layers),
    )


class _Kept(NamedTuple):
    """What a part of a layer keeps of a token."""

    elements: float
    """In the compute format."""
    wide: float
    """Numbers in at least fp32."""
    indices: float = 0.0


class LayerCount:
    """Counts the layers of a legal run."""

    def __init__(self, run: Run, hot_experts: float = 1.0) -> None:
        """`hot_experts` are the rows that the rank of ep gets, over the mean."""
        self._run, self._model, self._hot = run, run.model, hot_experts
        self._tp, self._ep = run.parallel.tp, run.parallel.ep
        self.tokens = run.batch.micro_size * run.data.seq_len / (run.parallel.cp * run.parallel.tp)
        self.compute = BYTES[run.precision.compute]

    def layer(self, number: int) -> LayerBytes:
        """Layer number `number` of the whole model."""
        shapes = layer_shapes(self._model, number)
        return LayerBytes(*self._parameters(shapes), self.kept(number), self._waiting(shapes))

    def depth(self, number: int) -> LayerBytes:
        """Depth number `number` (from 0) of multi-token prediction: its block, and what is around it."""
        shapes, block = mtp_shapes(self._model, number), self._model.layers + number
        around = AROUND["offloaded" if self._offloaded else self._mode(block)]
        kept = self.kept(block) + around * self.tokens * self._model.hidden * self.compute
        return LayerBytes(*self._parameters(shapes), kept, self._waiting(shapes))

    def kept(self, number: int) -> float:
        """What layer number `number` keeps on the device of a microbatch: nothing, if all layers are offloaded."""
        return 0.0 if self._offloaded else self.saved(number)

    def saved(self, number: int) -> float:
        """What layer number `number` keeps of a microbatch, here or in CPU memory."""
        mode, width = self._mode(number), self._model.hidden
        if mode == "full":
            return self.tokens * width * self.compute
        keeps_cheap = mode == "none"
        attention = (
            self._attention(keeps_cheap) if self._model.mla is None else self._latent(self._model.mla, keeps_cheap)
        )
        moe = self._model.moe if is_moe(self._model, number) else None
        ffn = self._dense(keeps_cheap) if moe is None else self._mixture(moe, keeps_cheap)
        elements = (4 if keeps_cheap else 2) * width + attention.elements + ffn.elements
        wide = attention.wide + ffn.wide
        return self.tokens * (elements * self.compute + wide * max(4, self.compute) + ffn.indices * INDEX)

    @property
    def _offloaded(self) -> bool:
        return "activations" in self._run.offload

    def _mode(self, number: int) -> str:
        recompute = self._run.recompute
        return recompute.mode if number % recompute.every == 0 else "none"

    def _attention(self, keeps_cheap: bool) -> _Kept:
        model = self._model
        elements = 2 * (model.heads + model.key_value_heads) * model.head_size
        return _Kept(elements * (2 if keeps_cheap and model.qk_norm else 1), wide=model.heads)

    def _latent(self, mla: LatentAttention, keeps_cheap: bool) -> _Kept:
        heads, key = self._model.heads, mla.plain + mla.rotated
        short = (mla.q_rank or 0) + mla.kv_rank + mla.rotated
        if not keeps_cheap:
            products = heads * (key + mla.plain + mla.value) + mla.rotated * self._tp
            return _Kept(short + products + heads * key, wide=heads)
        normed = (mla.q_rank or 0) + mla.kv_rank
        cut = heads * mla.value if mla.value < key else 0
        return _Kept(short + normed + 4 * heads * key + cut, wide=heads)

    def _dense(self, keeps_cheap: bool) -> _Kept:
        up = 2 if self._model.activation == "swiglu" else 1
        return _Kept((up + keeps_cheap) * self._model.ffn, wide=0)

    def _mixture(self, moe: Experts, keeps_cheap: bool) -> _Kept:
        loss, choices, got = self._run.loss, moe.top_k, moe.top_k * self._hot
        shared = (2 + keeps_cheap) * moe.ffn * moe.shared
        arriving = self._arriving(moe)
        scores = 1 + (loss.router_z > 0) + (loss.balance_sequence > 0)
        return _Kept(
            elements=2 * moe.ffn * got + arriving * self._model.hidden + shared,
            wide=scores * moe.experts + choices + got,
            indices=3 * choices if self._ep == 1 else (2 + arriving) * choices + min(choices, self._ep) + 3 * got,
        )

    def _arriving(self, moe: Experts) -> float:
        """Tokens that come to this rank's experts, a token of its own."""
        return tokens_arriving(moe, self._ep, self._hot) if self._ep > 1 else 0.0

    def _parameters(self, shapes: Shapes) -> tuple[float, float]:
        """Elements on one rank: those that tp cuts or leaves whole, and those of its experts."""
        dense = sum(prod(shape) / self._cut(name, shape) for name, shape in shapes.items() if EXPERTS not in name)
        return dense, sum(prod(shape) for name, shape in shapes.items() if EXPERTS in name) / self._ep

    def _cut(self, name: str, shape: tuple[int, ...]) -> int:
        return self._tp if len(shape) == 2 and not name.endswith(WHOLE) else 1

    def _waiting(self, shapes: Shapes) -> float:
        """The inputs of the matrices, and their output gradients, which row layers gather over tp to compute."""
        matrices = {n: shape for n, shape in shapes.items() if len(shape) == 2 and not n.endswith(WITHOUT_DEFERRAL)}
        gradients: float = sum(rows * (self._tp if n.endswith(ROW_LAYERS) else 1) for n, (rows, _) in matrices.items())
        inputs: float = sum(columns for n, (_, columns) in matrices.items() if not n.endswith(SAME_INPUT))
        moe = self._model.moe
        if moe is not None and any(EXPERTS in n for n in shapes):
            got = moe.top_k * self._hot
            gradients += got * (2 * moe.ffn + self._model.hidden)
            inputs += self._model.hidden * (1 if self._ep == 1 else self._arriving(moe) + (moe.shared > 0))
            inputs += got * moe.ffn
        return self.tokens * (gradients + inputs) * self.compute
