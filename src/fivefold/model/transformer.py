"""The dense decoder-only transformer, one implementation of the Llama and the BLOOM family.

Which norm, activation, position embedding, biases and head it has are independent fields of the run file's `Model`.
Parallelism is applied from outside; nothing here knows of ranks. Names and shapes of the parameters are in `spec.py`.
"""

# b sequences  s positions  d model width  f feed-forward width  v vocabulary

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.run import Model
from fivefold.kernels.cross_entropy import linear_cross_entropy
from fivefold.kernels.linear import linear
from fivefold.kernels.swiglu import swiglu
from fivefold.model.attention import Attention, Context, context
from fivefold.model.layers import Linear, norm
from fivefold.model.spec import vocabulary


class Transformer(nn.Module):
    """Tokens in, the sum of their losses or their logits out. The order below is the order of computation."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(vocabulary(model), model.hidden)
        self.embedding_norm = norm(model) if model.embedding_norm else nn.Identity()
        self.layers = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm = norm(model)
        self.head = Head(model)

    def forward(
        self,
        tokens_bs: Tensor,
        labels_bs: Tensor | None = None,
        documents_bs: Tensor | None = None,
        packed: bool = False,
    ) -> Tensor:
        """With labels: the SUM of the losses of those that are not -100, a scalar in at least fp32. Else logits_bsv.

        documents_bs numbers each row's documents in ascending order; attention and positions stay inside a document.
        It is read only if `packed` says that some row holds more than one.
        """
        x_bsd = self.embedding_norm(self.embedding(tokens_bs))
        shared = context(self.model, x_bsd, documents_bs if packed else None)
        for layer in self.layers:
            x_bsd = layer(x_bsd, shared)
        tied_weight = self.embedding.weight if self.model.tied else None
        return self.head(self.norm(x_bsd), labels_bs, tied_weight)


class Block(nn.Module):
    """Attention, then feed-forward, each on a norm of the residual stream and added to it: x_bsd -> x_bsd."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention_norm = norm(model)
        self.attention = Attention(model)
        self.ffn_norm = norm(model)
        self.ffn = SwiGLU(model) if model.activation == "swiglu" else GELU(model)

    def forward(self, x_bsd: Tensor, shared: Context) -> Tensor:
        attended_bsd = self.attention(self.attention_norm(x_bsd), shared)
        x_bsd, normed_bsd = self.ffn_norm.after_adding(x_bsd, attended_bsd)
        return x_bsd + self.ffn(normed_bsd)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), gate and up as one product with alternate columns (Shazeer 2020)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate_up = Linear(model.hidden, 2 * model.ffn, bias=model.bias)
        self.down = Linear(model.ffn, model.hidden, bias=model.bias)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x_bsd)))


class GELU(nn.Module):
    """down(gelu(up x)), the tanh approximation (Hendrycks & Gimpel 2016)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.up = Linear(model.hidden, model.ffn, bias=model.bias)
        self.down = Linear(model.ffn, model.hidden, bias=model.bias)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_bsd), approximate="tanh"))


class Head(nn.Module):
    """The output projection, and the loss without all logits. A tied head has no weight: it gets the embedding's."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        if not model.tied:
            self.weight = Linear(model.hidden, vocabulary(model), bias=False).weight

    def forward(self, x_bsd: Tensor, labels_bs: Tensor | None = None, tied_weight: Tensor | None = None) -> Tensor:
        weight_vd = self.weight if tied_weight is None else tied_weight
        if labels_bs is None:
            return linear(x_bsd, weight_vd)
        return linear_cross_entropy(x_bsd, weight_vd, labels_bs)
