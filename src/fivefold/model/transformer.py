"""The decoder-only transformer, one implementation of the Llama, DeepSeek and BLOOM families, dense or with experts.

Which norm, attention, feed-forward, position embedding, biases and head it has are independent fields of the run file's
`Model`; a layer is a `Block`.
Between layers the tokens of all sequences are one dimension, of which a rank may hold a slice (tp); a sequence may be
cut over ranks before that (cp). The layers that communicate are those of `parallel`: column and row layers, embedding,
attention. Names and shapes of the parameters are in `spec.py`.
"""

# b sequences  s positions  t tokens of this rank  T tokens of all ranks of tp = b s / cp
# d model width  f feed-forward width / tp  v vocabulary / tp

from __future__ import annotations

from torch import Tensor, nn

from fivefold.config.run import Model
from fivefold.kernels.cross_entropy import linear_cross_entropy
from fivefold.kernels.linear import linear
from fivefold.model.activations import activation_policies
from fivefold.model.attention import context
from fivefold.model.block import Block
from fivefold.model.layers import norm
from fivefold.model.ledger import Ledger
from fivefold.model.mtp import Depth, inputs_ahead, minimize_too
from fivefold.model.part import WHOLE, Part
from fivefold.model.spec import vocabulary
from fivefold.parallel.context import positions
from fivefold.parallel.state import TIED_COPY
from fivefold.parallel.tensor import ColumnLinear, Embedding, vocabulary_share

EMBEDDING = "embedding.weight"
"""The parameter of the first stage that the last one may have a copy of."""


class Transformer(nn.Module):
    """Tokens in, the sum of their losses or their logits out. The order below is the order of computation.

    The modules are those of `part`: a stage that does not begin the model has no embedding, one that does not end it
    neither the last norm nor the head nor multi-token prediction, whose stage has a copy of the embedding. Layers keep
    their numbers in the whole model.
    """

    def __init__(self, model: Model, part: Part = WHOLE) -> None:
        super().__init__()
        self.model, self.part = model, part
        if embeds(model, part):
            self.embedding = Embedding(vocabulary(model), model.hidden, part.tp, part.deferral)
            if not part.first:
                setattr(self.embedding, TIED_COPY, EMBEDDING)
        if part.first:
            self.embedding_norm = norm(model) if model.embedding_norm else nn.Identity()
        layers, depths = part.layers_of(model), range(model.mtp if part.last else 0)
        numbers = [*layers, *(model.layers + depth for depth in depths)]
        policies = iter(activation_policies(part.recompute, part.offload_activations, numbers))
        self.layers = nn.ModuleDict({str(number): Block(model, number, part, next(policies)) for number in layers})
        if part.last:
            self.norm = norm(model)
            self.head = Head(model, part)
            self.mtp = nn.ModuleDict(
                {str(depth): Depth(model, model.layers + depth, part, next(policies)) for depth in depths}
            )

    def forward(
        self,
        tokens_bs: Tensor,
        labels_bs: Tensor | None = None,
        documents_bs: Tensor | None = None,
        packed: bool = False,
        x_td: Tensor | None = None,
        ledger: Ledger | None = None,
    ) -> Tensor:
        """With labels: the SUM of the losses of those that are not -100, a scalar in at least fp32. Else logits_bsv.

        A stage that does not begin the model is given what the one before it returned, x_td, beside the tokens; a stage
        that does not end it returns x_td, with or without labels.

        All ranks of tp and cp get the same whole sequences, and the sum over them of what they return is the loss.
        documents_bs numbers each row's documents in ascending order; attention and positions stay inside a document.
        It is read only if `packed` says that some row holds more than one. In training the ledger takes what the layers
        have to report; multi-token prediction then adds to the gradient, and not to what is returned.
        """
        documents_bs = documents_bs if packed else None
        mine = positions(tokens_bs.shape[1], self.part.cp, self.part.cp_method, tokens_bs.device)
        if x_td is None:
            x_td = self.embedding_norm(self.embedding(tokens_bs[:, mine].flatten()))
        shared = context(self.model, self.part, x_td, mine, documents_bs, tokens_bs.shape)
        shared.ledger = ledger
        for layer in self.layers.values():
            x_td = layer(x_td, shared)
        if not self.part.last:
            return x_td
        state_td = self.norm(x_td)
        tied_weight = self.embedding.weight if self.head.weight is None else None
        if labels_bs is None:
            return self.head.logits(state_td, tied_weight).unflatten(0, shared.rows)
        states, labels, factors = [state_td], [labels_bs[:, mine].flatten()], [1.0]
        if ledger is None:
            return self.head(states, labels, factors, tied_weight)[0]
        for depth, module in enumerate(self.mtp.values()):
            tokens_T, labels_T = inputs_ahead(tokens_bs, labels_bs, documents_bs, mine, depth + 1)
            states.append(module(states[-1], self.embedding(tokens_T), shared))
            labels.append(labels_T)
            factors.append(self.part.objective.mtp / len(self.mtp) * ledger.divisor / ledger.mtp_divisors[depth])
        loss, *further = self.head(states, labels, factors, tied_weight)
        for depth, each in enumerate(further):
            ledger.predicted(depth, each.detach())
        return minimize_too(loss, further, factors[1:])


def embeds(model: Model, part: Part) -> bool:
    """Whether a stage looks tokens up: to begin the model, or to predict further tokens from the next ones."""
    return part.first or (part.last and model.mtp > 0)


class Head(nn.Module):
    """The output projection, and the loss without all logits.

    A tied head has no weight and gets the embedding's; where the stage has no embedding, it holds a copy of it.
    """

    def __init__(self, model: Model, part: Part) -> None:
        super().__init__()
        self.tp, self.vocabulary, self.deferral = part.tp, vocabulary(model), part.deferral
        self.register_parameter("weight", None)
        if model.tied and embeds(model, part):
            return
        if model.tied:
            setattr(self, TIED_COPY, EMBEDDING)
        column = ColumnLinear(model.hidden, self.vocabulary, bias=False, tp=part.tp)
        self.weight, self.cuts = column.weight, column.cuts

    def forward(
        self, states: list[Tensor], labels: list[Tensor], factors: list[float], tied_weight: Tensor | None = None
    ) -> list[Tensor]:
        """This rank's share of the sum of the losses, of each of the states x_td, which have labels_T of their own.

        All in one call, so that the weight is gathered once and its gradient reduced once. The gradient of each sum
        will be that of the first times its factor.
        """
        weight_vd = self.weight if tied_weight is None else tied_weight
        share = vocabulary_share(self.vocabulary, self.tp)
        return [
            linear_cross_entropy(x_td, weight_vd, labels_T, share=share, deferral=self.deferral, factor=factor)
            for x_td, labels_T, factor in zip(states, labels, factors, strict=True)
        ]

    def logits(self, x_td: Tensor, tied_weight: Tensor | None = None) -> Tensor:
        """(t, v), on a rank that has the whole vocabulary."""
        return linear(x_td, self.weight if tied_weight is None else tied_weight)
