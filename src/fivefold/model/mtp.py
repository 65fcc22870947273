"""Multi-token prediction: after the model, modules in a chain that each predict one token further than the one before.

Depth k turns the state that predicts token i + k, and the embedding of that token, into the state that predicts token
i + k + 1, with a block of its own; embedding and head are the model's. Each depth adds its mean loss to what is
minimized, in training alone: validation and generation do not run it. Its labels are counted over the whole step
beforehand, as the next token's are. Source: DeepSeek-AI 2024 (DeepSeek-V3), section 2.2.
"""

# b sequences  s positions of this rank (all / cp)  S all positions  t tokens of this rank  T of all ranks of tp = b s
# d model width

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fivefold.config.run import Model
from fivefold.kernels.cross_entropy import IGNORE
from fivefold.model.activations import Policy
from fivefold.model.attention import Context
from fivefold.model.block import Block
from fivefold.model.layers import norm
from fivefold.model.ledger import Routed
from fivefold.model.part import Part
from fivefold.parallel.tensor import WholeLinear


class Depth(nn.Module):
    """A state and the embedding of the token that it predicts, both (t, d) -> the state that predicts one further.

    `number` is that of its block: those of the model's layers come before.
    """

    def __init__(self, model: Model, number: int, part: Part, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.embedding_norm, self.hidden_norm = norm(model, policy), norm(model, policy)
        self.project = WholeLinear(2 * model.hidden, model.hidden, part.deferral)
        self.block = Block(model, number, part, policy)
        self.norm = norm(model, policy)

    def forward(self, state_td: Tensor, embedded_td: Tensor, shared: Context) -> Tensor:
        state_td, routed = self.policy.run(self.compute, state_td, embedded_td, shared)
        if routed is not None:
            shared.report(self.block.number, routed)
        return state_td

    def compute(self, state_td: Tensor, embedded_td: Tensor, shared: Context) -> tuple[Tensor, Routed | None]:
        """The new state, and what the block's router reports; once, or again in backward, as the policy has it run."""
        halves = self.embedding_norm(embedded_td), self.hidden_norm(state_td)
        x_td, routed = self.block.compute(self.project(self.policy.cheap(beside, *halves)), shared)
        return self.norm(x_td), routed


def beside(left_td: Tensor, right_td: Tensor) -> Tensor:
    """Both as one, (t, 2 d)."""
    return torch.cat([left_td, right_td], dim=1)


def inputs_ahead(
    tokens_bS: Tensor, labels_bS: Tensor, documents_bS: Tensor | None, positions_s: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """What depth number `depth`, from 1, has at these positions: the tokens that it is given, its labels, each (T,).

    Both are those of as many positions further on. A label that lies behind the row's end, or in another document than
    the position, is IGNORE; its token is then any, since no position with a label sees it. documents_bS is None if each
    row is one document.
    """
    last = tokens_bS.shape[1] - 1
    ahead_s = (positions_s + depth).clamp(max=last)
    labels_bs = labels_bS[:, ahead_s].masked_fill(positions_s + depth > last, IGNORE)
    if documents_bS is not None:
        labels_bs = labels_bs.masked_fill(documents_bS[:, ahead_s] != documents_bS[:, positions_s], IGNORE)
    return tokens_bS[:, ahead_s].flatten(), labels_bs.flatten()


def minimize_too(loss: Tensor, others: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """`loss`, a scalar, whose backward also goes through each of `others`, scalars, times its factor."""
    return _MinimizeToo.apply(loss, list(factors), *others) if others else loss


class _MinimizeToo(torch.autograd.Function):
    """The gradient of loss + sum of factor x other, the value of loss."""

    @staticmethod
    def forward(ctx, loss: Tensor, factors: list[float], *_: Tensor) -> Tensor:
        ctx.factors = factors
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss: Tensor):
        return d_loss, None, *(d_loss * factor for factor in ctx.factors)
