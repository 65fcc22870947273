"""Causal attention inside documents, each device's best kernel behind one call.

What all layers of a forward share, who sees whom, is prepared once as a mask object; `attend` runs the kernel that fits
it. On CUDA no mask of N x N numbers ever exists: a row that is one document goes to cuDNN (or FlashAttention), packed
rows and ALiBi to a compiled flex attention, which skips the blocks that no document touches. On a CPU, and for fp64,
which only proofs use, it is torch's own attention with a dense mask.
"""

# b sequences  s positions  h query heads  g key/value heads  e head size

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fivefold.kernels.linear import product_dtype

BLOCK = 128
"""Positions in a block of the flex kernel."""
FUSED_DTYPES = (torch.bfloat16, torch.float16)
"""What cuDNN and FlashAttention compute in."""


@dataclass(frozen=True)
class Causal:
    """Each token sees itself and all before it in its row."""


@dataclass(frozen=True)
class Dense:
    """Each token sees what `bias_bhss`, added to the scores, does not set to -inf. Sizes b and h may be 1."""

    bias_bhss: Tensor


@dataclass(frozen=True)
class Blocks:
    """Each token sees itself and all before it in its document; scores get the heads' ALiBi slopes, if any."""

    block_mask: BlockMask
    slopes_h: Tensor | None


Mask = Causal | Dense | Blocks


def attention_mask(hidden_bsd: Tensor, documents_bs: Tensor | None, slopes: Sequence[float] | None) -> Mask:
    """Who sees whom in rows like `hidden_bsd`, whose format and device choose the kernel.

    documents_bs numbers the documents of each row in ascending order; None if every row is one document. `slopes` are
    ALiBi's, one for each head that this rank computes; None without ALiBi.
    """
    dtype, device = hidden_bsd.dtype, hidden_bsd.device
    on_cuda = device.type == "cuda"
    if documents_bs is None and slopes is None and (dtype in FUSED_DTYPES or not on_cuda):
        return Causal()
    wide = torch.promote_types(dtype, torch.float32)
    slopes_h = None if slopes is None else torch.tensor(slopes, dtype=wide, device=device)
    if on_cuda and dtype != torch.float64:
        one = torch.zeros(hidden_bsd.shape[:2], dtype=torch.int32, device=device)
        return Blocks(document_blocks(one if documents_bs is None else documents_bs), slopes_h)
    one = torch.zeros((1, hidden_bsd.shape[1]), dtype=torch.int32, device=device)
    return Dense(dense_bias(one if documents_bs is None else documents_bs, slopes_h, wide))


def attend(q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor, mask: Mask) -> Tensor:
    """softmax(q k^T / sqrt(e) + bias) v -> (b, s, h, e). Query head i uses key/value head i // (h / g)."""
    q_bhse, k_bgse, v_bgse = (x.transpose(1, 2) for x in (q_bshe, k_bsge, v_bsge))
    if isinstance(mask, Causal):
        out_bhse = _causal(q_bhse, k_bgse, v_bgse)
    elif isinstance(mask, Dense):
        out_bhse = _dense(q_bhse, k_bgse, v_bgse, mask)
    else:
        out_bhse = _blocks(q_bhse, k_bgse, v_bgse, mask)
    return out_bhse.transpose(1, 2)


def document_starts(documents_bs: Tensor) -> Tensor:
    """(b, s): the row's position at which each token's document starts."""
    positions = torch.arange(documents_bs.shape[1], device=documents_bs.device)
    first = F.pad(documents_bs[:, 1:] != documents_bs[:, :-1], (1, 0), value=True)
    return torch.where(first, positions, 0).cummax(dim=1).values


def dense_bias(documents_bs: Tensor, slopes_h: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(b, h or 1, s, s) to be added to scores: -inf outside the document and after the query, else ALiBi or 0."""
    positions = torch.arange(documents_bs.shape[1], device=documents_bs.device)
    distance_ss = positions - positions[:, None]  # key - query: 0 and less is seen
    seen_bss = (documents_bs[:, :, None] == documents_bs[:, None, :]) & (distance_ss <= 0)
    bias_hss = torch.zeros(1, 1, 1, dtype=dtype, device=documents_bs.device)
    if slopes_h is not None:
        bias_hss = slopes_h[:, None, None] * distance_ss
    return torch.where(seen_bss[:, None], bias_hss, float("-inf"))


def document_blocks(documents_bs: Tensor) -> BlockMask:
    """The flex kernel's mask: which blocks of keys a block of queries meets, and which of them it sees whole.

    Documents are numbered in ascending order, so a block's first and last number tell all: nothing N x N is made.
    """
    length = documents_bs.shape[1]
    padded = F.pad(documents_bs, (0, -length % BLOCK), value=length)
    first, last = padded[:, ::BLOCK], padded[:, BLOCK - 1 :: BLOCK]
    block = torch.arange(first.shape[1], device=documents_bs.device)
    met_bqk = (block <= block[:, None]) & (last[:, None, :] >= first[:, :, None])
    whole_bqk = (block < block[:, None]) & (first[:, None, :] == last[:, :, None])

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (documents_bs[b, query] == documents_bs[b, key])

    return BlockMask.from_kv_blocks(
        *_ordered(met_bqk & ~whole_bqk), *_ordered(whole_bqk), BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def _ordered(chosen_bqk: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks are chosen and which, chosen ones first: (b, 1, q) and (b, 1, q, k)."""
    count = chosen_bqk.sum(-1, dtype=torch.int32)
    order = chosen_bqk.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[:, None], order[:, None]


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gqa = q.shape[1] != k.shape[1]
    if not q.is_cuda:
        wide = product_dtype(q)
        q_, k_, v_ = q.to(wide), k.to(wide), v.to(wide)
        return F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=gqa).to(q.dtype)
    # Named here and not around the whole forward, so that recompute in backward runs the same kernel.
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Dense) -> Tensor:
    wide = product_dtype(q)
    q_, k_, v_ = q.to(wide), k.to(wide), v.to(wide)
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q_, k_, v_, attn_mask=mask.bias_bhss, enable_gqa=gqa).to(q.dtype)


def _blocks(q: Tensor, k: Tensor, v: Tensor, mask: Blocks) -> Tensor:
    slopes_h = mask.slopes_h

    def alibi(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert slopes_h is not None
        return score + slopes_h[h] * (key - query)

    return _compiled_flex()(
        q,
        k,
        v,
        score_mod=None if slopes_h is None else alibi,
        block_mask=mask.block_mask,
        enable_gqa=q.shape[1] != k.shape[1],
    )


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)
