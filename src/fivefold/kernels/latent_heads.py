"""Queries, keys and values of latent attention's heads, put together from its products in one pass.

A query or key head is a plain part, then a part that turns with the position; a key's turning part is one for all
heads. Everything is copied into tensors of its own, so that none of the products has to be kept for backward.
Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
"""

# b sequences  s positions  h heads  e plain + turning width  i plain + value width  r turning width

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.compiled import compiled_on_cuda
from fivefold.kernels.rotary import turn


@compiled_on_cuda
def latent_heads(
    q_bshe: Tensor, kv_bshi: Tensor, k_bsr: Tensor, tables: tuple[Tensor, Tensor], factor: float, value_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys (b, s, h, e) with their last r channels turned, and values (b, s, h, value_width).

    kv_bshi holds the plain part of each head's key, then its value; k_bsr is the turning part of all heads' keys.
    `tables` are cosine and sine of `rotation`, (s, r) or (b, s, r) if rows differ. Queries are multiplied by `factor`,
    in the precision of the tables. Values are filled up with zeros.
    """
    cos, sin = (table.unsqueeze(-2) for table in tables)
    turning = k_bsr.shape[-1]
    plain = q_bshe.shape[-1] - turning
    wide = q_bshe.to(torch.promote_types(q_bshe.dtype, cos.dtype))
    q_plain, q_turning = wide.split([plain, turning], dim=-1)
    k_plain, values = kv_bshi.split([plain, kv_bshi.shape[-1] - plain], dim=-1)
    k_turned = turn(k_bsr.unsqueeze(2), cos, sin).expand(-1, -1, k_plain.shape[2], -1)
    return (
        (torch.cat([q_plain, turn(q_turning, cos, sin)], dim=-1) * factor).to(q_bshe.dtype),
        torch.cat([k_plain, k_turned], dim=-1),
        F.pad(values, (0, value_width - values.shape[-1])),
    )
