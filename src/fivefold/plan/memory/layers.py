"""What another stack than ours keeps of a microbatch for backward, and what it needs beside it, in bytes of one rank.

Per token of width d, with heads a and g of size e over a sequence of s, feed-forward width f and w bytes a number, a
layer keeps outside of its products, on all tokens unless tp has sequence parallelism, the inputs of both norms and of
the products behind them, 4 d w, and with dropout two masks of a byte, 2 d. Inside, each / tp, it keeps queries, keys,
values and attention's output, (2 a + 2 g) e w; what the activation takes and gives, (1 or 2) f w + f w; of unfused
attention the probabilities, a s w, with dropout once more and a mask; of fused attention 4 bytes a head. For GELU,
equal heads and dropout that is 34 d + 5 a s (Korthikanti et al. 2022, eq. 1). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.config.run import Experts, LatentAttention, Run
from fivefold.model.spec import is_moe, vocabulary
from fivefold.pipeline.layer_bytes import BYTES, LayerCount
from fivefold.plan.software import COMPILED, UNFUSED, Software

LOGIT = 2 + 4 + 4
"""Bytes a logit while the loss is computed: in 16 bits, in fp32, and the gradient of that, written over the softmax."""
FUSED, WHOLE, SPLIT = 2 + 2, 2 + 4 + 4 + 4, 2 + 4 + 4 + 4 + 4
LOGITS = {
    "fsdp1": (FUSED, FUSED),
    "fsdp1-pure": (FUSED, FUSED),
    "fsdp2": (WHOLE, SPLIT),
}
"""The same by stack, without and with tp. MosaicML's loss is one kernel that writes the gradient over the logits;
torchtitan's has logits in 16 bits, in fp32, their log-softmax and its gradient, with tp one more gradient."""
NARROW = 1
"""Bytes of a number in 8 bits. The scales of a block of 128 are left out."""
CHEAP = frozenset({"norm", "activation", "rope"})
"""The parts of a layer that are computed again without a matrix product; a compiler does so unasked."""


@dataclass(frozen=True)
class _Tokens:
    """Bytes that one token of the sequence takes on one rank, by where they lie."""

    outside: float
    inside: float

    @property
    def all(self) -> float:
        """Both."""
        return self.outside + self.inside


class StackLayers:
    """Counts the layers of a run that another stack executes."""

    def __init__(self, run: Run, software: Software) -> None:
        self._run, self._model, self._software = run, run.model, software
        self._tp = run.parallel.tp
        self._tokens = run.batch.micro_size * run.data.seq_len / run.parallel.cp
        self._width = BYTES[run.precision.compute]
        narrow = software.narrow_activations and run.precision.linear != "auto"
        self._product_width = NARROW if narrow else self._width
        self._outside = 1 / self._tp if software.sequence_parallel else 1.0
        self._hot = software.hot_experts
        self._waiting = LayerCount(run, self._hot)

    def kept(self, number: int) -> float:
        """Of a microbatch, from forward to backward."""
        return self._tokens * self._layer(number, self._recomputed(number))

    def waiting(self, number: int) -> float:
        """What weight gradients hold that wait."""
        share = self._product_width / self._width
        return self._waiting.layer(number).waiting * share if number < self._model.layers else 0.0

    def working(self, number: int) -> float:
        """Beside what is kept, while the layer's backward runs: what it computes again, and the largest gradients."""
        model, width = self._model, self._width
        plain = CHEAP if self._software.generation == COMPILED else frozenset[str]()
        again = self._layer(number, plain) - self._layer(number, self._recomputed(number))
        feed_forward = 2 * self._widths(number) * width
        scores = 2 * model.heads * self._run.data.seq_len * width if self._software.generation == UNFUSED else 0.0
        stream = (2 if self._tp == 1 else 4) * model.hidden * width
        return self._tokens * (max(0.0, again) + max(feed_forward, scores) / self._tp + stream)

    def embedding(self) -> float:
        """Kept behind the embedding: dropout's mask."""
        return self._tokens * self._outside * self._model.hidden * self._software.dropout

    def head(self) -> float:
        """Kept by the last norm and the head: their inputs."""
        return self._tokens * self._outside * 2 * self._model.hidden * self._width

    def logits(self) -> float:
        """While the loss is computed."""
        bytes_each = LOGITS.get(self._software.name, (LOGIT, LOGIT))[self._tp > 1]
        whole = 4 * self._tokens * self._model.hidden * self._width if self._tp > 1 else 0.0
        return self._tokens * vocabulary(self._model) / self._tp * bytes_each + whole

    def boundary(self) -> float:
        """What is sent between two stages."""
        return self._tokens * self._outside * self._model.hidden * self._width

    def _recomputed(self, number: int) -> frozenset[str]:
        recompute = self._run.recompute
        mode = recompute.mode if number % recompute.every == 0 else "none"
        unasked = CHEAP if self._software.generation == COMPILED else frozenset[str]()
        if mode == "full":
            return frozenset({"full"})
        return unasked | self._software.selective if mode == "selective" else unasked

    def _layer(self, number: int, again: frozenset[str]) -> float:
        """Of one token of the sequence, on this rank."""
        hidden, width = self._model.hidden, self._width
        if "full" in again:
            return self._outside * hidden * width
        mla = self._model.mla
        attention = self._heads(again) if mla is None else self._latent(mla, again)
        ffn = self._mixture(self._model.moe, again) if self._model.moe and is_moe(self._model, number) else None
        up = self._dense(self._model.ffn, again) if ffn is None else ffn
        inputs = 1 if "half" in again else 2
        normed = 0 if again & {"half", "norm"} else 2
        stream = hidden * (inputs * width + normed * self._product_width + 2 * self._software.dropout)
        return self._outside * stream + (attention + up) / self._tp

    def _heads(self, again: frozenset[str]) -> float:
        model = self._model
        numbers = 2 * model.heads + (1 if "half" in again else 2) * max(model.key_value_heads, self._tp)
        return numbers * model.head_size * self._width + self._core(again)

    def _latent(self, mla: LatentAttention, again: frozenset[str]) -> float:
        key = mla.plain + mla.rotated
        short = 2 * ((mla.q_rank or 0) + mla.kv_rank + mla.rotated) * self._tp
        up = 0 if "up_projection" in again else self._model.heads * (2 * key + mla.value)
        return (short + up + self._model.heads * mla.value) * self._width + self._core(again)

    def _core(self, again: frozenset[str]) -> float:
        """Between queries, keys and values and attention's output."""
        if self._software.generation != UNFUSED:
            return 4 * self._model.heads
        if "attention" in again:
            return 0.0
        return self._model.heads * self._run.data.seq_len * (self._width + 3 * self._software.dropout)

    def _dense(self, ffn: float, again: frozenset[str]) -> float:
        if "ffn" in again:
            return 0.0
        gates = 2 if self._model.activation == "swiglu" else 1
        up = 1 if "half" in again else gates
        return (up + ("activation" not in again)) * ffn * self._product_width

    def _mixture(self, moe: Experts, again: frozenset[str]) -> float:
        """Rows before and behind the experts, and what they keep; with tp its ranks share out the tokens."""
        behind, got = 0 if self._product_width < self._width else self._width, moe.top_k * self._hot
        rows = got * self._model.hidden * (self._product_width + behind)
        scores = 3 * 4 * moe.experts
        return rows + scores + self._dense(moe.ffn * (got + moe.shared), again)

    def _widths(self, number: int) -> float:
        """Columns of a feed-forward's first product that a token meets."""
        gates = 2 if self._model.activation == "swiglu" else 1
        moe = self._model.moe
        if moe is None or not is_moe(self._model, number):
            return gates * self._model.ffn
        got = moe.top_k * self._hot
        return gates * moe.ffn * (got + moe.shared) + 2 * got * self._model.hidden
