"""A mixture of experts in the place of a block's feed-forward: a router, its experts, and shared ones beside them.

The experts of a layer are spread over the ranks of ep, and tokens travel to them (parallel/expert.py); shared experts
are a dense feed-forward, cut over tp. No token is dropped unless the run sets a capacity. The router's bias and the
load of the last step are state that is no parameter: they change once a step, from the counts of all ranks.
Sources: Shazeer et al. 2017, Fedus et al. 2021, DeepSeek-AI 2024 (DeepSeek-V3).
"""

# b sequences  S positions of a sequence  s positions of this rank of cp  t tokens of this rank  k choices of a token
# E all experts  e experts of this rank  d model width  f width of an expert

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from fivefold.config.run import Experts as Settings
from fivefold.config.run import Model
from fivefold.kernels.expert_feed_forward import Rows, expert_feed_forward
from fivefold.kernels.linear import wide_linear
from fivefold.kernels.routing import (
    Choice,
    Sorted,
    capacity,
    choose,
    counts_of,
    sort_by_expert,
    within_capacity,
    without_dropped,
)
from fivefold.model.activations import Policy
from fivefold.model.attention import Context
from fivefold.model.feed_forward import SwiGLU
from fivefold.model.ledger import Routed
from fivefold.model.part import Part
from fivefold.parallel.context import whole_rows
from fivefold.parallel.expert import through_experts
from fivefold.parallel.state import Cut


class MoE(nn.Module):
    """x_td -> the update to the residual stream, the same shape, and what became of the tokens."""

    def __init__(self, model: Model, number: int, part: Part, policy: Policy) -> None:
        super().__init__()
        moe = _settings(model)
        self.number, self.legs = number, part.ep_legs
        self.router = Router(model, part)
        self.experts = Experts(model, part)
        self.shared = SwiGLU(model.hidden, moe.ffn * moe.shared, False, part, policy) if moe.shared else None

    def forward(self, x_td: Tensor, shared: Context) -> tuple[Tensor, Routed]:
        gates_tk, choices, routed = self.router(x_td, shared)
        meanwhile = None if self.shared is None else partial(self.shared, x_td)
        return through_experts(x_td, gates_tk, choices, self.legs, self.experts, meanwhile), routed


class Router(nn.Module):
    """Which experts each token goes to, with what gate, and what of it is added to the loss."""

    bias: Tensor | None
    """(E,): added to each expert's score for the choice alone."""
    load: Tensor
    """(E,): the share of the choices that each expert had in the step before."""
    placement: Tensor | None = None
    """(E,) int64: the slot among all experts' weights in which each expert lies; None for that of its number. The
    router's own weights and numbers are in the order of the experts, wherever those lie."""

    def __init__(self, model: Model, part: Part) -> None:
        super().__init__()
        self.moe, self.part = _settings(model), part
        self.weight = nn.Parameter(torch.empty(self.moe.experts, model.hidden))
        self.register_buffer("bias", torch.zeros(self.moe.experts) if self.moe.bias else None)
        self.register_buffer("load", torch.full((self.moe.experts,), 1 / self.moe.experts))

    def forward(self, x_td: Tensor, shared: Context) -> tuple[Tensor, Sorted, Routed]:
        """Gates (t, k), the choices as rows sorted by their experts' slots, and what is reported of them."""
        logits_tE = wide_linear(x_td, self.weight)
        choice = choose(logits_tE, self.bias, self.moe)
        choices, counts_E = self._sorted(choice.experts_tk)
        dropped = choices.ends_e.new_zeros(())
        if self.part.objective.capacity_factor is not None:
            kept_tk = self._kept(choice.experts_tk, shared)
            choices = without_dropped(choices, kept_tk)
            choice = choice._replace(gates_tk=choice.gates_tk.masked_fill(~kept_tk, 0))
            dropped = (~kept_tk).sum()
        balance, z = self._losses(logits_tE, choice, shared)
        gates_tk = _AddLoss.apply(choice.gates_tk, balance + z)
        return gates_tk, choices, Routed(counts_E, dropped, balance.detach(), z.detach())

    def _sorted(self, experts_tk: Tensor) -> tuple[Sorted, Tensor]:
        """The choices as rows sorted by slot, and how many each expert has (E,)."""
        if self.placement is None:
            choices = sort_by_expert(experts_tk, self.moe.experts)
            return choices, counts_of(choices.ends_e)
        choices = sort_by_expert(self.placement[experts_tk], self.moe.experts)
        return choices, counts_of(choices.ends_e)[self.placement]

    def _losses(self, logits_tE: Tensor, choice: Choice, shared: Context) -> tuple[Tensor, Tensor]:
        """This rank's shares of the balance loss and the z-loss, as they are added to the loss."""
        objective, experts = self.part.objective, self.moe.experts
        balance = z = logits_tE.new_zeros(())
        if objective.a_sequence:
            load_tE, length = self._loads_of_sequences(choice.experts_tk, shared)
            balance = balance + objective.a_sequence * experts / length * (load_tE * choice.probabilities_te).sum()
        if objective.a_token:
            balance = balance + objective.a_token * experts * (self.load * choice.probabilities_te).sum()
        if objective.a_logit:
            z = objective.a_logit * logits_tE.logsumexp(dim=-1).square().sum()
        return balance, z

    @torch.no_grad()
    def _loads_of_sequences(self, experts_tk: Tensor, shared: Context) -> tuple[Tensor, int]:
        """The share of its sequence's choices that each expert has, for each token (t, E), and a sequence's length."""
        b, s = shared.rows
        row_t = self._row_of_tokens(shared, len(experts_tk), experts_tk.device)
        places = (experts_tk + self.moe.experts * row_t[:, None]).flatten()
        ones = torch.ones_like(places, dtype=torch.promote_types(self.load.dtype, torch.float32))
        counts = ones.new_zeros(b * self.moe.experts).scatter_add_(0, places, ones)
        counts_bE = self.part.cp.sum_(self.part.tp.sum_(counts)).view(b, -1)
        length = s * self.part.cp.size
        return (counts_bE / (length * self.moe.top_k))[row_t], length

    @torch.no_grad()
    def _kept(self, experts_tk: Tensor, shared: Context) -> Tensor:
        """Which choices their experts still take. Needs whole sequences, so the ranks of tp and cp gather theirs."""
        b, s = shared.rows
        factor, part = self.part.objective.capacity_factor, self.part
        assert factor is not None
        mine = part.tp.gather(experts_tk).unflatten(0, (b, s))
        experts_bSk, position_s = whole_rows(mine, part.cp, part.cp_method)
        most = capacity(factor, s * part.cp.size, self.moe)
        kept_bsk = within_capacity(experts_bSk, self.moe.experts, most)[:, position_s]
        t = len(experts_tk)
        return kept_bsk.flatten(0, 1)[part.tp.rank * t : (part.tp.rank + 1) * t]

    def _row_of_tokens(self, shared: Context, t: int, device: torch.device) -> Tensor:
        """The sequence of each of this rank's tokens, (t,)."""
        return (torch.arange(t, device=device) + self.part.tp.rank * t) // shared.rows[1]

    @torch.no_grad()
    def update(self, counts_E: Tensor, applied: Tensor) -> None:
        """After a step: take over its counts, of all ranks, and move the bias against them. Nothing if not `applied`.

        An expert that had more tokens than the mean becomes less likely, one that had fewer more likely.
        """
        share_E = (counts_E / counts_E.sum()).to(self.load.dtype)
        self.load.copy_(torch.where(applied, share_E, self.load))
        if self.bias is not None:
            change_E = self.part.objective.bias_rate * (counts_E.mean() - counts_E).sign()
            self.bias.add_(torch.where(applied, change_E, 0).to(self.bias.dtype))


class Experts(nn.Module):
    """The experts of this rank: each a SwiGLU (Shazeer 2020), with gate and up as one product with alternate rows."""

    def __init__(self, model: Model, part: Part) -> None:
        super().__init__()
        moe = _settings(model)
        mine = moe.experts // part.ep.size
        self.deferral = part.expert_deferral
        self.gate_up = nn.Parameter(torch.empty(mine, 2 * moe.ffn, model.hidden))
        self.down = nn.Parameter(torch.empty(mine, model.hidden, moe.ffn))
        self.cuts = {name: Cut(0, moe.experts) for name in ("gate_up", "down")}
        self.widths = {"gate_up": 1, "down": 2}
        self.spread_over_ep = True

    def forward(self, x_nd: Tensor, gates_r: Tensor, rows: Rows) -> Tensor:
        """gates x the output of each row's expert, (r, d)."""
        return expert_feed_forward(x_nd, gates_r, rows, self.gate_up, self.down, self.deferral)


def _settings(model: Model) -> Settings:
    assert model.moe is not None, "the model has experts"
    return model.moe


class _AddLoss(torch.autograd.Function):
    """Gives its first argument; the second is part of the loss, which is not seen in what forward returns."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, d_x: Tensor):
        return d_x, ctx.like
