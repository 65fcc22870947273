"""Attention written out, the oracle of every kernel and of every cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def documents(rows: Sequence[Sequence[int]]) -> Tensor:
    """(b, s) int32: the documents' numbers in rows packed from documents of these lengths."""
    return torch.stack(
        [torch.repeat_interleave(torch.arange(len(row), dtype=torch.int32), torch.tensor(row)) for row in rows]
    )


def formula(q: Tensor, k: Tensor, v: Tensor, documents_bs: Tensor | None, slopes: list[float] | None) -> Tensor:
    """Every score, its bias slope x key position, every mask: q (b, s, h, e), k and v (b, s, g, e) -> (b, s, h, e)."""
    repeats = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
    position = torch.arange(q.shape[1], device=q.device)
    if slopes is not None:
        scores = scores + torch.tensor(slopes, dtype=q.dtype, device=q.device)[:, None, None] * position
    seen = (position <= position[:, None]).expand(q.shape[0], -1, -1)
    if documents_bs is not None:
        seen = seen & (documents_bs[:, :, None] == documents_bs[:, None, :])
    probabilities = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhqk,bkhe->bqhe", probabilities, v)
