"""Causal attention inside documents, each device's best kernel behind one call.

What all layers of a forward share, who sees whom, is prepared once as a mask object; `attend` runs the kernel that fits
it. On CUDA no mask of N x N numbers ever exists: a row that is one document goes to cuDNN (or FlashAttention), packed
rows and ALiBi to a compiled flex attention, which skips the blocks that no document touches. On a CPU, and for fp64,
which only proofs use, it is torch's own attention with a dense mask.
"""

# b sequences  s positions  h query heads  g key/value heads  e head size  in masks ss is queries x keys

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from fivefold.kernels.linear import product_dtype

BLOCK = 128
"""Positions in a block of the flex kernel."""
FLEX_BYTES = 512
"""Of a query up to which torch's own blocks fit into an H100's shared memory, whatever the width; those of fp32 with
heads of 192 do not (torch 2.11)."""
FLEX_WIDTH = 16
"""The narrowest head that the flex kernel takes."""
FUSED_DTYPES = (torch.bfloat16, torch.float16)
"""What cuDNN and FlashAttention compute in."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(score, b, h, query, key) -> score."""
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(b, h, query, key) -> whether it is seen."""


@dataclass(frozen=True)
class Rows:
    """The positions of a sequence, ascending, on which queries or keys stand."""

    positions_s: Tensor
    documents_bs: Tensor | None
    """The document of each, numbered in ascending order along a row; None if every row is one document."""


@dataclass(frozen=True)
class Causal:
    """Each token sees itself and all before it in its row."""


@dataclass(frozen=True)
class Dense:
    """Each query sees what `bias_bhss`, added to the scores, does not set to -inf. Sizes b and h may be 1."""

    bias_bhss: Tensor

    @functools.cached_property
    def sees_bhs(self) -> Tensor:
        """Whether each query sees any key."""
        return (self.bias_bhss > float("-inf")).any(-1)


@dataclass(frozen=True)
class Blocks:
    """Each query sees the keys of its document at its position and before it; scores get ALiBi's bias, if any."""

    block_mask: BlockMask
    alibi: ScoreMod | None


Mask = Causal | Dense | Blocks


def attention_mask(hidden_bsd: Tensor, documents_bs: Tensor | None, slopes: Sequence[float] | None) -> Mask:
    """Who sees whom in rows like `hidden_bsd`, whose format and device choose the kernel.

    documents_bs numbers the documents of each row in ascending order; None if every row is one document. `slopes` are
    ALiBi's, one for each head that this rank computes; None without ALiBi.
    """
    slopes_h = slopes_like(hidden_bsd, slopes)
    if is_plain(hidden_bsd, documents_bs, slopes_h):
        return Causal()
    rows = Rows(torch.arange(hidden_bsd.shape[1], device=hidden_bsd.device), documents_bs)
    if has_flex(hidden_bsd):
        alibi = None if slopes_h is None else alibi_by_index(slopes_h)
        return Blocks(blocks_of(rows), alibi)
    return Dense(dense_bias(rows, rows, slopes_h, torch.promote_types(hidden_bsd.dtype, torch.float32)))


def mask_between(like: Tensor, queries: Rows, keys: Rows, slopes_h: Tensor | None) -> Dense | Blocks:
    """Which of some keys each of some queries sees; the format and device of `like` choose the kernel."""
    if has_flex(like):
        alibi = None if slopes_h is None else alibi_by_position(slopes_h, queries, keys)
        return Blocks(blocks_between(queries, keys), alibi)
    return Dense(dense_bias(queries, keys, slopes_h, torch.promote_types(like.dtype, torch.float32)))


def is_plain(like: Tensor, documents_bs: Tensor | None, slopes_h: Tensor | None) -> bool:
    """Whether kernels that know no other mask than the causal one, and no bias, serve activations like `like`."""
    return documents_bs is None and slopes_h is None and (like.dtype in FUSED_DTYPES or not like.is_cuda)


def has_flex(like: Tensor) -> bool:
    """Whether the flex kernel serves activations like `like`."""
    return like.is_cuda and like.dtype != torch.float64


def slopes_like(like: Tensor, slopes: Sequence[float] | None) -> Tensor | None:
    """ALiBi's slopes on the device of `like`, in at least fp32."""
    if slopes is None:
        return None
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.tensor(slopes, dtype=wide).to(like.device, non_blocking=True)


def attend(q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor, mask: Mask) -> Tensor:
    """softmax(q k^T / sqrt(e) + bias) v -> (b, s, h, e). Query head i uses key/value head i // (h / g).

    Where the mask `takes_narrow_values`, those of v and of the output may be fewer than e.
    """
    q_bhse, k_bgse, v_bgse = (x.transpose(1, 2) for x in (q_bshe, k_bsge, v_bsge))
    if isinstance(mask, Causal):
        out_bhse = _causal(q_bhse, k_bgse, v_bgse)
    elif isinstance(mask, Dense):
        out_bhse = _dense(q_bhse, k_bgse, v_bgse, mask)
    else:
        out_bhse = _blocks(q_bhse, k_bgse, v_bgse, mask)
    return out_bhse.transpose(1, 2)


def takes_narrow_values(mask: Mask) -> bool:
    """Whether the kernel of the mask is as fast, and keeps as little, with values narrower than queries and keys.

    Fused kernels want one width, and torch then falls back on one that keeps a number for each query and key: fill
    narrow values up with zeros, and cut the output.
    """
    return isinstance(mask, Blocks)


def document_starts(documents_bs: Tensor) -> Tensor:
    """(b, s): the row's position at which each token's document starts."""
    positions = torch.arange(documents_bs.shape[1], device=documents_bs.device)
    first = F.pad(documents_bs[:, 1:] != documents_bs[:, :-1], (1, 0), value=True)
    return torch.where(first, positions, 0).cummax(dim=1).values


def dense_bias(queries: Rows, keys: Rows, slopes_h: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(b or 1, h or 1, queries, keys) to be added to scores: -inf for a key that is not seen, else ALiBi or 0."""
    distance_ss = keys.positions_s - queries.positions_s[:, None]  # 0 and less is seen
    seen_bss = distance_ss[None] <= 0
    if queries.documents_bs is not None and keys.documents_bs is not None:
        seen_bss = seen_bss & (queries.documents_bs[:, :, None] == keys.documents_bs[:, None, :])
    bias_hss = torch.zeros(1, 1, 1, dtype=dtype, device=distance_ss.device)
    if slopes_h is not None:
        bias_hss = slopes_h[:, None, None] * distance_ss
    return torch.where(seen_bss[:, None], bias_hss, float("-inf"))


def blocks_of(rows: Rows) -> BlockMask:
    """The flex kernel's mask of whole rows, whose positions are their places."""
    return _blocks_of(rows, rows, _before_by_index)


def blocks_between(queries: Rows, keys: Rows) -> BlockMask:
    """The flex kernel's mask of some queries and some keys."""
    return _blocks_of(queries, keys, _before_by_position(queries, keys))


def _blocks_of(queries: Rows, keys: Rows, before: MaskMod) -> BlockMask:
    """Which blocks of keys a block of queries meets, and which of them it sees whole.

    Positions and documents ascend, so a block's first and last tell all: nothing queries x keys is made.
    """
    lengths = len(queries.positions_s), len(keys.positions_s)
    (first_q, last_q), (first_k, last_k) = _ends(queries.positions_s), _ends(keys.positions_s)
    met_bqk = (first_k <= last_q[:, None])[None]
    full_q, full_k = (torch.arange(BLOCK, n + BLOCK, BLOCK, device=first_q.device) <= n for n in lengths)
    whole_bqk = ((last_k <= first_q[:, None]) & full_q[:, None] & full_k)[None]
    if queries.documents_bs is not None and keys.documents_bs is not None:
        (first_bq, last_bq), (first_bk, last_bk) = _ends(queries.documents_bs), _ends(keys.documents_bs)
        met_bqk = met_bqk & (last_bk[:, None, :] >= first_bq[:, :, None])
        whole_bqk = whole_bqk & (first_bk[:, None, :] == last_bq[:, :, None])
    return BlockMask.from_kv_blocks(
        *_ordered(met_bqk & ~whole_bqk),
        *_ordered(whole_bqk),
        BLOCK,
        mask_mod=_in_document(before, queries, keys),
        seq_lengths=lengths,
    )


def _ends(values: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last value of each block of the last dimension."""
    last = torch.arange(BLOCK, values.shape[-1] + BLOCK, BLOCK, device=values.device) - 1
    return values[..., ::BLOCK], values[..., last.clamp(max=values.shape[-1] - 1)]


def _before_by_index(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _before_by_position(queries: Rows, keys: Rows) -> MaskMod:
    query_s, key_s = queries.positions_s, keys.positions_s

    def before(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key_s[key] <= query_s[query]

    return before


def _in_document(before: MaskMod, queries: Rows, keys: Rows) -> MaskMod:
    query_bs, key_bs = queries.documents_bs, keys.documents_bs
    if query_bs is None or key_bs is None:
        return before

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return before(b, h, query, key) & (query_bs[b, query] == key_bs[b, key])

    return sees


def alibi_by_index(slopes_h: Tensor) -> ScoreMod:
    """slope x (key - query), of whole rows."""

    def alibi(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + slopes_h[h] * (key - query)

    return alibi


def alibi_by_position(slopes_h: Tensor, queries: Rows, keys: Rows) -> ScoreMod:
    """slope x (key - query), of some queries and some keys."""
    query_s, key_s = queries.positions_s, keys.positions_s

    def alibi(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score + slopes_h[h] * (key_s[key] - query_s[query])

    return alibi


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
    gqa = q.shape[1] != k.shape[1]
    return flex(q, k, v, score_mod=mask.alibi, block_mask=mask.block_mask, enable_gqa=gqa)


def flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """`flex_attention`, compiled. Heads that are too narrow for it are filled up with zeros."""
    width, scale = v.shape[-1], q.shape[-1] ** -0.5
    if q.is_cuda and q.element_size() * q.shape[-1] > FLEX_BYTES:
        options["kernel_options"] = {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}
    if min(width, q.shape[-1]) >= FLEX_WIDTH:
        return _compiled_flex()(q, k, v, **options)
    q, k, v = (F.pad(x, (0, max(0, FLEX_WIDTH - x.shape[-1]))) for x in (q, k, v))
    found = _compiled_flex()(q, k, v, scale=scale, **options)
    return (found[0][..., :width], *found[1:]) if isinstance(found, tuple) else found[..., :width]


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    """`flex_attention`, compiled."""
    return torch.compile(flex_attention)
