"""Multi-head latent attention: keys and values of all heads come from one short vector a token, queries from another.

What makes the short vectors is small, so its weights are whole on every rank of tp, which applies them to its own
tokens; what makes heads of them is cut by heads, and gathers the short vectors instead of the residual stream. One part
of each query and key head turns with the position, and that of the key is one for all heads: it comes beside the short
vector and is gathered too. Names and shapes of the parameters are in `spec.py`; the rows of a part that turns are in
the order of `kernels/rotary.py`, first halves of all pairs before the second ones.
Sources: DeepSeek-AI 2024 (DeepSeek-V2, V3); Peng et al. 2023 (yarn, whose temperature is in the scores).
"""

# b sequences  s positions of this rank (all / cp)  t tokens of this rank  T of all ranks of tp = b s
# d model width  h heads / tp  e width of a query or key head  i of its plain part and its value  o h heads' width

from __future__ import annotations

from torch import Tensor, nn

from fivefold.config.run import Model
from fivefold.kernels.attention import takes_narrow_values
from fivefold.kernels.latent_heads import latent_heads
from fivefold.model import rope
from fivefold.model.activations import KEEP, Policy
from fivefold.model.attention import Context
from fivefold.model.layers import RMSNorm
from fivefold.model.part import WHOLE, Part
from fivefold.parallel.context import ContextPlan
from fivefold.parallel.tensor import ColumnLinear, RowLinear, WholeLinear, gather_sequence


class LatentAttention(nn.Module):
    """Causal self-attention from short vectors: x_td -> the update to the residual stream, the same shape.

    For backward it keeps the short vectors before and after their norms, queries, keys, values and attention's output,
    and none of the products that queries, keys and values are put together from.
    """

    def __init__(self, model: Model, part: Part = WHOLE, policy: Policy = KEEP) -> None:
        super().__init__()
        assert model.mla is not None, "the model has latent attention"
        assert model.mla.value <= model.mla.plain + model.mla.rotated, "a rule refuses values wider than keys"
        mla, tp, deferral = model.mla, part.tp, part.deferral
        self.policy, self.tp = policy, tp
        self.plain, self.rotated, self.value, self.short = mla.plain, mla.rotated, mla.value, mla.kv_rank
        self.factor = rope.score_factor(model)
        query_rows = model.heads * (mla.plain + mla.rotated)
        self.q = ColumnLinear(model.hidden, query_rows, False, tp, deferral) if mla.q_rank is None else None
        if mla.q_rank is not None:
            self.q_a = WholeLinear(model.hidden, mla.q_rank, deferral)
            self.q_a_norm = RMSNorm(mla.q_rank, model.norm_eps, policy)
            self.q_b = ColumnLinear(mla.q_rank, query_rows, False, tp, deferral)
        self.kv_a = WholeLinear(model.hidden, mla.kv_rank + mla.rotated, deferral)
        self.kv_a_norm = RMSNorm(mla.kv_rank, model.norm_eps, policy)
        self.kv_b = ColumnLinear(mla.kv_rank, model.heads * (mla.plain + mla.value), False, tp, deferral)
        self.output = RowLinear(model.heads * mla.value, model.hidden, False, tp, deferral)

    def forward(self, x_td: Tensor, shared: Context) -> Tensor:
        q_To = self.q_b(self.q_a_norm(self.q_a(x_td))) if self.q is None else self.q(x_td)
        short_t, turning_t = self.kv_a(x_td).split([self.short, self.rotated], dim=-1)
        kv_To = self.kv_b(self.kv_a_norm(short_t))
        k_bsr = gather_sequence(turning_t, self.tp).unflatten(0, shared.rows)
        q_bshe = q_To.unflatten(0, shared.rows).unflatten(-1, (-1, self.plain + self.rotated))
        kv_bshi = kv_To.unflatten(0, shared.rows).unflatten(-1, (-1, self.plain + self.value))
        narrow = not isinstance(shared.mask, ContextPlan) and takes_narrow_values(shared.mask)
        width = self.value if narrow else q_bshe.shape[-1]
        heads = self.policy.cheap(latent_heads, q_bshe, kv_bshi, k_bsr, shared.turn, self.factor, width)
        out_bshe = shared.attend(*heads)
        if width != self.value:
            out_bshe = self.policy.cheap(_first_channels, out_bshe, self.value)
        return self.output(out_bshe.flatten(0, 1).flatten(1))


def _first_channels(x: Tensor, channels: int) -> Tensor:
    """A copy, and no view: what was cut off is not kept beside it."""
    return x[..., :channels].contiguous()
