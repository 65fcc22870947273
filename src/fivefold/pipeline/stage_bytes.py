"""What a stage takes of a rank's memory, in bytes: its state, which is always there, and what each microbatch adds.

Activations are counted as the model's functions save them on a GPU, each tensor once, in the compute format. With t
tokens of a rank (micro_size x seq_len / cp / tp), width d, query heads h and key/value heads g of size e, and
feed-forward width f, a layer keeps for each of its tokens

    everything            4 d + (2 h + 2 g) e + 3 f      block input, two norms, the sum between; q, k, v, output of
                                                         attention; gate, up and their product (gelu: 2 f)
    selective recompute   2 d + (2 h + 2 g) e + 2 f      block input, update of attention; q, k, v in one, output;
                                                         gate and up (gelu: f)
    full recompute        d                              block input

and attention's log-sum-exp; the norm of queries and keys keeps (2 h + 2 g) e beside everything. Weight gradients that
wait hold the inputs and output gradients of the four products, those behind tp's sums on all its tokens. The head keeps
the last norm's input and its gradient; its weight's gradient is added up at once. Its logits exist in small chunks and
are left out, as is what a layer that is computed again takes meanwhile: every rank has one such layer. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from statistics import fmean

from fivefold.config.run import Precision, Run
from fivefold.model.spec import layer_shapes, vocabulary
from fivefold.pipeline.times import Sizes

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
ROW_LAYERS = ("output.weight", "down.weight")
"""The matrices whose columns tp cuts."""


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
        self._tokens = run.batch.micro_size * run.data.seq_len / (run.parallel.cp * run.parallel.tp)
        self._compute = BYTES[run.precision.compute]

    @cached_property
    def _edge(self) -> float:
        """Parameters of the embedding, or of the head, on one rank of tp."""
        return vocabulary(self._run.model) * self._run.model.hidden / self._run.parallel.tp

    def stage(self, layers: int, kept: float, first: bool, last: bool) -> StageBytes:
        """A stage of so many layers, which keep `kept` of a microbatch; `first` with the embedding, `last` the head."""
        embedding_norm = self._tokens * self._run.model.hidden * self._compute * self._run.model.embedding_norm
        return StageBytes(
            state=self._state(layers * self._layer_elements() + (first + last) * self._edge),
            forward=kept + (embedding_norm if first else 0.0) + (self._head() if last else 0.0),
            weight=layers * self._deferred(),
        )

    def kept(self, layer: int) -> float:
        """What layer number `layer` keeps on the device of a microbatch, if it is not offloaded by itself."""
        if "activations" in self._run.offload:
            return 0.0
        recompute = self._run.recompute
        return self._layer(recompute.mode if layer % recompute.every == 0 else "none")

    def mean_kept(self) -> float:
        """The mean of `kept` over the model's layers."""
        return fmean(map(self.kept, range(self._run.model.layers)))

    def waiting_share(self) -> float:
        """What a layer holds from I to the end of W, as a share of what it holds before, if nothing is offloaded."""
        recompute = self._run.recompute
        modes = [recompute.mode if layer % recompute.every == 0 else "none" for layer in range(self._run.model.layers)]
        return self._deferred() / fmean(self._layer(mode) for mode in modes)

    def _layer(self, mode: str) -> float:
        """What a layer keeps of a microbatch in a mode of recompute."""
        model, width = self._run.model, self._run.model.hidden
        if mode == "full":
            return self._tokens * width * self._compute
        queries, pairs = model.heads * model.head_size, model.key_value_heads * model.head_size
        up = 2 * model.ffn if model.activation == "swiglu" else model.ffn
        elements = 2 * queries + 2 * pairs + up
        if mode == "selective":
            elements += 2 * width
        else:
            elements += 4 * width + model.ffn + (2 * queries + 2 * pairs if model.qk_norm else 0)
        log_sum_exp = model.heads * max(4, self._compute)
        return self._tokens * (elements * self._compute + log_sum_exp)

    def _deferred(self) -> float:
        """The inputs of a layer's matrices, and their output gradients, which row layers gather over tp to compute."""
        matrices = {name: shape for name, shape in layer_shapes(self._run.model, 0).items() if len(shape) == 2}
        tp = self._run.parallel.tp
        elements = sum(
            rows * (tp if name.endswith(ROW_LAYERS) else 1) + columns for name, (rows, columns) in matrices.items()
        )
        return self._tokens * elements * self._compute

    def _head(self) -> float:
        """The last norm's input and the gradient of its output."""
        return 2 * self._tokens * self._run.model.hidden * self._compute

    def _layer_elements(self) -> float:
        """Parameters of a layer on one rank of tp, which cuts its matrices."""
        tp = self._run.parallel.tp
        return sum(prod(shape) / (tp if len(shape) == 2 else 1) for shape in layer_shapes(self._run.model, 0).values())

    def _state(self, elements: float) -> float:
        """Bytes of so many of a stage's parameters (after tp), optimizer included."""
        run, parallel = self._run, self._run.parallel
        assert parallel.dp != "auto", "the ranks are known"
        shards = 1 if parallel.zero == 0 else parallel.dp // parallel.replicate * parallel.cp
        master, reduce = master_bytes(run.precision), reduce_bytes(run.precision)
        copies = 0 if "parameters" in run.offload else 2 if "optimizer" in run.offload else 4
        gathered = min(elements, max(self._layer_elements(), self._edge)) if parallel.zero == 3 else elements
        return elements * copies * master / shards + gathered * self._compute + elements * reduce


def master_bytes(precision: Precision) -> int:
    """Bytes of a weight as it is kept, and of each of its moments."""
    if precision.master != "auto":
        return BYTES[precision.master]
    return BYTES["fp64"] if precision.compute == "fp64" else BYTES["fp32"]


def reduce_bytes(precision: Precision) -> int:
    """Bytes of a gradient before it is reduced."""
    return master_bytes(precision) if precision.reduce == "auto" else BYTES[precision.reduce]
