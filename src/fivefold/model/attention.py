"""Self-attention of one block, and what all blocks of a forward share: who sees whom, and each position's rotation.

Queries, keys and values come from one product, each key/value head's beside its queries, so that a cut of the rows
into equal parts gives each rank of tp whole groups of heads. Ranks of cp hold some positions of each sequence and
exchange what attention needs of the others.
"""

# b sequences  s positions of this rank (all / cp)  S all positions  t tokens of this rank  T of all ranks of tp = b s
# d model width  h query heads / tp  g key/value heads / tp  e head size

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.config.run import Model
from fivefold.kernels.alibi import alibi_slopes
from fivefold.kernels.attention import Mask, attend, attention_mask, document_starts
from fivefold.kernels.rms_norm import rms_norm
from fivefold.kernels.rotary import rotate, rotation
from fivefold.model import rope
from fivefold.model.activations import KEEP, Policy
from fivefold.model.layers import RMSNorm
from fivefold.model.ledger import Ledger, Routed
from fivefold.model.part import WHOLE, Part
from fivefold.parallel.context import ContextPlan, attend_across, plan_attention
from fivefold.parallel.tensor import ColumnLinear, RowLinear, piece


class Context:
    """What the blocks share. No dataclass and no tuple: FSDP looks into those and casts what it finds to bf16."""

    def __init__(self, rows: tuple[int, int], mask: Mask | ContextPlan, turn: tuple[Tensor, Tensor] | None) -> None:
        self.rows = rows  # (b, s): the tokens T as rows
        self.mask = mask
        self.ledger: Ledger | None = None  # in training, what takes the layers' reports
        self.turn = turn  # tables of `rotate` for each position, (s, e) or (b, s, e); None without rotary embedding

    def report(self, layer: int, routed: Routed) -> None:
        """A layer with experts says what became of a microbatch."""
        if self.ledger is not None:
            self.ledger.routed(layer, routed)

    def attend(self, q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor) -> Tensor:
        """Attention of this rank's positions over all -> (b, s, h, e); with cp a collective call, backward too."""
        if isinstance(self.mask, ContextPlan):
            return attend_across(q_bshe, k_bsge, v_bsge, self.mask)
        return attend(q_bshe, k_bsge, v_bsge, self.mask)


def context(
    model: Model, part: Part, like: Tensor, positions_s: Tensor, documents_bS: Tensor | None, shape: torch.Size
) -> Context:
    """Prepared once a forward, for activations in the format and on the device of `like`.

    positions_s are this rank's of the whole sequences (b, S) = `shape`; documents_bS is None if each row is one
    document.
    """
    slopes = alibi_slopes(model.heads) if model.position == "alibi" else None
    if slopes is not None:
        mine = piece(model.heads, part.tp)
        slopes = slopes[mine.start : mine.stop]
    turn = _turn(model, like, positions_s, documents_bS) if model.position == "rope" else None
    rows = shape[0], len(positions_s)
    like_bs = like.new_empty((*rows, 0))
    if part.cp.size == 1:
        return Context(rows, attention_mask(like_bs, documents_bS, slopes), turn)
    return Context(rows, plan_attention(part.cp, part.cp_method, shape[1], like_bs, documents_bS, slopes), turn)


def _turn(model: Model, like: Tensor, positions_s: Tensor, documents_bS: Tensor | None) -> tuple[Tensor, Tensor]:
    positions = positions_s
    if documents_bS is not None:
        positions = positions_s - document_starts(documents_bS)[:, positions_s]
    wide = torch.promote_types(like.dtype, torch.float32)
    frequencies = rope.frequencies(model, wide).to(like.device, non_blocking=True)
    return rotation(positions, frequencies, rope.attention_factor(model))


class Attention(nn.Module):
    """Causal self-attention with grouped queries: x_td -> the update to the residual stream, the same shape.

    Sources: Vaswani et al. 2017; Ainslie et al. 2023 (grouped queries); Henry et al. 2020 (norm of queries and keys).
    """

    def __init__(self, model: Model, part: Part = WHOLE, policy: Policy = KEEP) -> None:
        super().__init__()
        self.policy, self.norm_eps = policy, model.norm_eps
        heads, kv_heads, self.head_size = model.heads, model.key_value_heads, model.head_size
        self.queries = heads // kv_heads  # of each key/value head
        self.qkv = ColumnLinear(
            model.hidden, (heads + 2 * kv_heads) * self.head_size, model.bias, part.tp, part.deferral
        )
        self.q_norm = RMSNorm(self.head_size, model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(self.head_size, model.norm_eps) if model.qk_norm else None
        self.output = RowLinear(heads * self.head_size, model.hidden, model.bias, part.tp, part.deferral)

    def forward(self, x_td: Tensor, shared: Context) -> Tensor:
        fused = self.qkv(x_td).unflatten(0, shared.rows).unflatten(-1, (-1, self.queries + 2, self.head_size))
        norms = [None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)]
        q_bshe, k_bsge, v_bsge = self.policy.cheap(split_heads, fused, *norms, self.norm_eps, shared.turn)
        out_bshe = shared.attend(q_bshe, k_bsge, v_bsge)
        return self.output(out_bshe.flatten(0, 1).flatten(1))


def split_heads(
    fused: Tensor,
    q_weight_e: Tensor | None,
    k_weight_e: Tensor | None,
    norm_eps: float,
    turn: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (b, s, h, e), keys and values (b, s, g, e) of the fused product (b, s, g, queries of a group + 2, e).

    Queries and keys are normed if there are weights for it, then turned.
    """
    q, k, v = fused.split([fused.shape[3] - 2, 1, 1], dim=3)
    q, k, v_bsge = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
    if q_weight_e is not None and k_weight_e is not None:
        q, k = rms_norm(q, q_weight_e, norm_eps), rms_norm(k, k_weight_e, norm_eps)
    if turn is not None:
        q, k = rotate(q, k, *turn)
        v_bsge = v_bsge.contiguous()  # a view would keep the whole product for backward, queries and keys included
    return q, k, v_bsge
