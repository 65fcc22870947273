"""What our own stack keeps of a microbatch and needs beside it, in bytes of one rank; with `pipeline/layer_bytes.py`.

That file counts what is kept, tensor by tensor as autograd saves them. Here is what exists while one layer's backward
runs, and while the head makes the logits of a chunk of tokens. Imports no torch.
"""

from __future__ import annotations

from fivefold.config.run import Recompute, Run
from fivefold.model.spec import is_moe, vocabulary
from fivefold.pipeline.heavy import offloaded_layers
from fivefold.pipeline.layer_bytes import AROUND, LayerCount

CHUNK = 2048
"""Tokens whose logits exist at one time on a GPU (kernels/cross_entropy.py)."""
A_LOGIT = 2 + 4
"""Bytes of one while it is made into its gradient: in 16 bits, and the logarithm of its softmax in fp32. An H200
agrees: 2,048 tokens more of 128,256 words took 1.5 GiB more, 6.1 bytes each."""


class OwnLayers:
    """Counts the layers of a legal run that this project trains."""

    def __init__(self, run: Run, hot_experts: float = 1.0) -> None:
        self._run, self._model, self._tp = run, run.model, run.parallel.tp
        self._hot = hot_experts
        self._count = LayerCount(run, hot_experts)
        self._plain = LayerCount(run.model_copy(update={"recompute": Recompute(mode="none")}), hot_experts)
        self._tokens, self._width = self._count.tokens, self._count.compute
        self._offloaded = frozenset[int]().union(*offloaded_layers(run)) if run.offload else frozenset[int]()

    def kept(self, number: int) -> float:
        """Of a microbatch, from forward to backward; with what is around a block of multi-token prediction."""
        saved = 0.0 if number in self._offloaded else self._count.saved(number)
        return saved + self._around(number)

    def waiting(self, number: int) -> float:
        """What weight gradients hold that wait."""
        depth = number - self._model.layers
        return (self._count.layer(number) if depth < 0 else self._count.depth(depth)).waiting

    def working(self, number: int) -> float:
        """Beside what is kept, while the layer's backward runs: what it computes again or fetches, and the gradients of
        the widest product's output and of the stream."""
        again = self._plain.saved(number) - (0.0 if number in self._offloaded else self._count.saved(number))
        stream = (2 if self._tp == 1 else 2 + 2 * self._tp) * self._model.hidden
        return again + self._tokens * (self._widest(number) + stream) * self._width

    def embedding(self) -> float:
        """Kept behind the embedding: the input of its norm, if it has one."""
        return self._tokens * self._model.hidden * self._model.embedding_norm * self._width

    def head(self) -> float:
        """The last norm's input and the gradient of the head's."""
        return 2 * self._tokens * self._model.hidden * self._width

    def logits(self) -> float:
        """While the loss of a chunk is computed, and with tp all its ranks' tokens and their gradients."""
        tokens = self._tokens * self._tp
        gathered = 2 * tokens * self._model.hidden * self._width if self._tp > 1 else 0.0
        return min(CHUNK, tokens) * vocabulary(self._model) / self._tp * A_LOGIT * self._width / 2 + gathered

    def boundary(self) -> float:
        """What is sent between two stages."""
        return self._tokens * self._model.hidden * self._width

    def _around(self, number: int) -> float:
        """Of a depth of multi-token prediction, what it keeps beside its block."""
        if number < self._model.layers:
            return 0.0
        recompute = self._run.recompute
        mode = recompute.mode if number % recompute.every == 0 else "none"
        widths = AROUND["offloaded" if number in self._offloaded else mode]
        return widths * self._tokens * self._model.hidden * self._width

    def _widest(self, number: int) -> float:
        """Columns of the largest gradients that exist at once, of a token."""
        moe = self._model.moe
        if moe is None or not is_moe(self._model, number):
            return (2 if self._model.activation == "swiglu" else 1) * self._model.ffn
        return moe.top_k * self._hot * (2 * self._model.hidden + 4 * moe.ffn)
