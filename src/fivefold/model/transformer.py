"""The dense decoder-only transformer, one implementation of the Llama and the BLOOM family.

Which norm, activation, position embedding, biases and head it has are independent fields of the run file's `Model`.
Between layers the tokens of all sequences are one dimension, of which a rank may hold a slice (tp); a sequence may be
cut over ranks before that (cp). The layers that communicate are those of `parallel`: column and row layers, embedding,
attention. Names and shapes of the parameters are in `spec.py`.
"""

# b sequences  s positions  t tokens of this rank  T tokens of all ranks of tp = b s / cp
# d model width  f feed-forward width / tp  v vocabulary / tp

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.run import Model
from fivefold.kernels.cross_entropy import linear_cross_entropy
from fivefold.kernels.linear import linear
from fivefold.kernels.swiglu import swiglu
from fivefold.model.activations import Policy, activation_policies
from fivefold.model.attention import Attention, Context, context
from fivefold.model.layers import norm
from fivefold.model.mla import LatentAttention
from fivefold.model.part import WHOLE, Part
from fivefold.model.spec import vocabulary
from fivefold.parallel.context import positions
from fivefold.parallel.tensor import ColumnLinear, Embedding, RowLinear, vocabulary_share


class Transformer(nn.Module):
    """Tokens in, the sum of their losses or their logits out. The order below is the order of computation.

    The modules are those of `part`: a stage that does not begin the model has no embedding, one that does not end it
    neither the last norm nor the head. Layers keep their numbers in the whole model.
    """

    def __init__(self, model: Model, part: Part = WHOLE) -> None:
        super().__init__()
        self.model, self.part = model, part
        if part.first:
            self.embedding = Embedding(vocabulary(model), model.hidden, part.tp, part.deferral)
            self.embedding_norm = norm(model) if model.embedding_norm else nn.Identity()
        layers = part.layers_of(model)
        policies = activation_policies(part.recompute, part.offload_activations, layers)
        self.layers = nn.ModuleDict(
            {str(number): Block(model, part, policy) for number, policy in zip(layers, policies, strict=True)}
        )
        if part.last:
            self.norm = norm(model)
            self.head = Head(model, part)

    def forward(
        self,
        tokens_bs: Tensor,
        labels_bs: Tensor | None = None,
        documents_bs: Tensor | None = None,
        packed: bool = False,
        x_td: Tensor | None = None,
    ) -> Tensor:
        """With labels: the SUM of the losses of those that are not -100, a scalar in at least fp32. Else logits_bsv.

        A stage that does not begin the model is given what the one before it returned, x_td, beside the tokens; a stage
        that does not end it returns x_td, with or without labels.

        All ranks of tp and cp get the same whole sequences, and the sum over them of what they return is the loss.
        documents_bs numbers each row's documents in ascending order; attention and positions stay inside a document.
        It is read only if `packed` says that some row holds more than one.
        """
        mine = positions(tokens_bs.shape[1], self.part.cp, self.part.cp_method).to(tokens_bs.device)
        if x_td is None:
            x_td = self.embedding_norm(self.embedding(tokens_bs[:, mine].flatten()))
        shared = context(self.model, self.part, x_td, mine, documents_bs if packed else None, tokens_bs.shape)
        for layer in self.layers.values():
            x_td = layer(x_td, shared)
        if not self.part.last:
            return x_td
        tied_weight = self.embedding.weight if self.model.tied and self.part.first else None
        if labels_bs is None:
            return self.head.logits(self.norm(x_td), tied_weight).unflatten(0, shared.rows)
        return self.head(self.norm(x_td), labels_bs[:, mine].flatten(), tied_weight)


class Block(nn.Module):
    """Attention, then feed-forward, each on a norm of the residual stream and added to it: x_td -> x_td."""

    def __init__(self, model: Model, part: Part, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.attention_norm = norm(model, policy)
        self.attention = (Attention if model.mla is None else LatentAttention)(model, part, policy)
        self.ffn_norm = norm(model, policy)
        self.ffn = (SwiGLU if model.activation == "swiglu" else GELU)(model, part, policy)

    def forward(self, x_td: Tensor, shared: Context) -> Tensor:
        return self.policy.run(self.compute, x_td, shared)

    def compute(self, x_td: Tensor, shared: Context) -> Tensor:
        """What forward gives, as the policy has it run: once, or again in backward."""
        attended_td = self.attention(self.attention_norm(x_td), shared)
        x_td, normed_td = self.ffn_norm.after_adding(x_td, attended_td)
        return x_td + self.ffn(normed_td)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), gate and up as one product with alternate columns (Shazeer 2020): x_td -> x_td."""

    def __init__(self, model: Model, part: Part, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.gate_up = ColumnLinear(model.hidden, 2 * model.ffn, model.bias, part.tp, part.deferral)
        self.down = RowLinear(model.ffn, model.hidden, model.bias, part.tp, part.deferral)

    def forward(self, x_td: Tensor) -> Tensor:
        hidden_Tf = self.policy.cheap(swiglu, self.gate_up(x_td))
        return self.down(hidden_Tf)


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x) by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


class GELU(nn.Module):
    """down(gelu(up x)), the tanh approximation (Hendrycks & Gimpel 2016): x_td -> x_td."""

    def __init__(self, model: Model, part: Part, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.up = ColumnLinear(model.hidden, model.ffn, model.bias, part.tp, part.deferral)
        self.down = RowLinear(model.ffn, model.hidden, model.bias, part.tp, part.deferral)

    def forward(self, x_td: Tensor) -> Tensor:
        hidden_Tf = self.policy.cheap(gelu, self.up(x_td))
        return self.down(hidden_Tf)


class Head(nn.Module):
    """The output projection, and the loss without all logits.

    A tied head has no weight and gets the embedding's; where the stage has no embedding, it holds a copy of it.
    """

    def __init__(self, model: Model, part: Part) -> None:
        super().__init__()
        self.tp, self.vocabulary, self.deferral = part.tp, vocabulary(model), part.deferral
        self.register_parameter("weight", None)
        if model.tied and part.first:
            return
        if model.tied:
            self.tied_copy = "embedding.weight"
        column = ColumnLinear(model.hidden, self.vocabulary, bias=False, tp=part.tp)
        self.weight, self.cuts = column.weight, column.cuts

    def forward(self, x_td: Tensor, labels_T: Tensor, tied_weight: Tensor | None = None) -> Tensor:
        """This rank's share of the sum of the losses."""
        weight_vd = self.weight if tied_weight is None else tied_weight
        share = vocabulary_share(self.vocabulary, self.tp)
        return linear_cross_entropy(x_td, weight_vd, labels_T, share=share, deferral=self.deferral)

    def logits(self, x_td: Tensor, tied_weight: Tensor | None = None) -> Tensor:
        """(t, v), on a rank that has the whole vocabulary."""
        return linear(x_td, self.weight if tied_weight is None else tied_weight)
