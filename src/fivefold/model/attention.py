"""Self-attention of one block, and what all blocks of a forward share: who sees whom, and each position's rotation.

Queries, keys and values come from one product, each key/value head's beside its queries, so that a cut of the rows
into equal parts gives each part whole groups of heads.
"""

# b sequences  s positions  d model width  h query heads  g key/value heads  e head size

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.config.run import Model
from fivefold.kernels.alibi import alibi_slopes
from fivefold.kernels.attention import Mask, attend, attention_mask, document_starts
from fivefold.kernels.rotary import rotate, rotation
from fivefold.model import rope
from fivefold.model.layers import Linear, RMSNorm


class Context:
    """What the blocks share. No dataclass and no tuple: FSDP looks into those and casts what it finds to bf16."""

    def __init__(self, mask: Mask, turn: tuple[Tensor, Tensor] | None) -> None:
        self.mask = mask
        self.turn = turn  # tables of `rotate` for each position, (s, e) or (b, s, e); None without rotary embedding


def context(model: Model, hidden_bsd: Tensor, documents_bs: Tensor | None) -> Context:
    """Prepared once a forward, for activations like `hidden_bsd`; documents_bs is None if each row is one document."""
    slopes = alibi_slopes(model.heads) if model.position == "alibi" else None
    turn = _turn(model, hidden_bsd, documents_bs) if model.position == "rope" else None
    return Context(attention_mask(hidden_bsd, documents_bs, slopes), turn)


def _turn(model: Model, hidden_bsd: Tensor, documents_bs: Tensor | None) -> tuple[Tensor, Tensor]:
    positions = torch.arange(hidden_bsd.shape[1], device=hidden_bsd.device)
    if documents_bs is not None:
        positions = positions - document_starts(documents_bs)
    wide = torch.promote_types(hidden_bsd.dtype, torch.float32)
    frequencies = rope.frequencies(model, wide).to(hidden_bsd.device, non_blocking=True)
    return rotation(positions, frequencies, rope.attention_factor(model))


class Attention(nn.Module):
    """Causal self-attention with grouped queries: x_bsd -> the update to the residual stream, the same shape.

    Sources: Vaswani et al. 2017; Ainslie et al. 2023 (grouped queries); Henry et al. 2020 (norm of queries and keys).
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.kv_heads, self.head_size = model.key_value_heads, model.head_size
        self.queries = model.heads // self.kv_heads  # of each key/value head
        self.qkv = Linear(model.hidden, (model.heads + 2 * self.kv_heads) * self.head_size, bias=model.bias)
        self.q_norm = RMSNorm(self.head_size, model.norm_eps) if model.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_size, model.norm_eps) if model.qk_norm else nn.Identity()
        self.output = Linear(model.heads * self.head_size, model.hidden, bias=model.bias)

    def forward(self, x_bsd: Tensor, context: Context) -> Tensor:
        grouped = self.qkv(x_bsd).unflatten(-1, (self.kv_heads, self.queries + 2, self.head_size))
        q, k, v = grouped.split([self.queries, 1, 1], dim=-2)
        q_bshe, k_bsge, v_bsge = self.q_norm(q.flatten(2, 3)), self.k_norm(k.squeeze(3)), v.squeeze(3)
        if context.turn is not None:
            q_bshe, k_bsge = rotate(q_bshe, k_bsge, *context.turn)
        return self.output(attend(q_bshe, k_bsge, v_bsge, context.mask).flatten(2))
