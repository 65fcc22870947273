"""One block of the transformer: attention and feed-forward, each on a norm of the residual stream and added to it."""

# t tokens of this rank  d model width

from __future__ import annotations

from torch import Tensor, nn

from fivefold.config.run import Model
from fivefold.model.activations import Policy
from fivefold.model.attention import Attention, Context
from fivefold.model.feed_forward import feed_forward
from fivefold.model.layers import norm
from fivefold.model.ledger import Routed
from fivefold.model.mla import LatentAttention
from fivefold.model.moe import MoE
from fivefold.model.part import Part
from fivefold.model.spec import is_moe


class Block(nn.Module):
    """x_td -> x_td. `number` is the layer's in the whole model; blocks that predict further tokens come after all."""

    def __init__(self, model: Model, number: int, part: Part, policy: Policy) -> None:
        super().__init__()
        self.number, self.policy = number, policy
        self.attention_norm = norm(model, policy)
        self.attention = (Attention if model.mla is None else LatentAttention)(model, part, policy)
        self.ffn_norm = norm(model, policy)
        self.ffn = MoE(model, number, part, policy) if is_moe(model, number) else feed_forward(model, part, policy)

    def forward(self, x_td: Tensor, shared: Context) -> Tensor:
        x_td, routed = self.policy.run(self.compute, x_td, shared)
        if routed is not None:
            shared.report(self.number, routed)
        return x_td

    def compute(self, x_td: Tensor, shared: Context) -> tuple[Tensor, Routed | None]:
        """The block's output, and what its router reports; once, or again in backward, as the policy has it run."""
        attended_td = self.attention(self.attention_norm(x_td), shared)
        x_td, normed_td = self.ffn_norm.after_adding(x_td, attended_td)
        if isinstance(self.ffn, MoE):
            update_td, routed = self.ffn(normed_td, shared)
            return x_td + update_td, routed
        return x_td + self.ffn(normed_td), None
