"""Attention over a part of the keys, and how parts are put together to the whole.

A piece is some queries, some keys and who sees whom among them. Its forward gives the output over these keys alone and
the log-sum-exp of their scores; weighed by the log-sum-exps, such outputs add up to attention over all keys. Its
backward takes output and log-sum-exp of the whole, which make the piece's gradients those of the whole, and which are
all that has to be kept. Sources: Milakov & Gimelshein 2018 (online softmax); Dao et al. 2022 (FlashAttention).
"""

# b sequences  n queries  m keys  h query heads  g key/value heads  e head size

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

from fivefold._torch import (
    cpu_attention,
    cpu_attention_backward,
    cudnn_attention,
    cudnn_attention_backward,
    flash_attention,
    flash_attention_backward,
)
from fivefold.kernels.attention import Blocks, Causal, Dense, flex
from fivefold.kernels.compiled import compiled_on_cuda
from fivefold.kernels.linear import product_dtype


@dataclass(frozen=True)
class Whole:
    """Each query sees every key."""


PartMask = Causal | Whole | Dense | Blocks


@dataclass(frozen=True)
class Piece:
    """Rows of the queries and rows of the keys at hand, and who sees whom among them."""

    queries: slice
    keys: slice
    mask: PartMask


ALL = slice(None)


def _begin(like_bhne: Tensor, queries: slice, first: Tensor, pieces: int) -> Tensor:
    """What a sum over `pieces` begins with: its first piece, of some queries or of all.

    It is kept in at least fp32, unless there are two pieces at most: they are added in fp32 and rounded once, to what
    an fp32 sum would be rounded to.
    """
    dtype = first.dtype if pieces <= 2 else torch.promote_types(first.dtype, torch.float32)
    if queries == ALL:
        return first.to(dtype)
    begun = torch.zeros_like(like_bhne, dtype=dtype)
    begun[:, :, queries] = first
    return begun


class Running:
    """The output of queries like q_bhne over the keys seen so far, which come in so many pieces."""

    def __init__(self, q_bhne: Tensor, pieces: int) -> None:
        self.pieces = pieces
        self.like_bhne = q_bhne
        self.out_bhne: Tensor | None = None
        self.lse_bhn = q_bhne.new_empty(0)

    def add(self, pieces: Iterable[Piece], q_bhne: Tensor, k_bgme: Tensor, v_bgme: Tensor) -> None:
        """See more keys."""
        for piece in pieces:
            rows, keys = (slice(None), slice(None), piece.queries), (slice(None), slice(None), piece.keys)
            out, lse = forward(q_bhne[rows], k_bgme[keys], v_bgme[keys], piece.mask)
            if self.out_bhne is not None:
                merge_(self.out_bhne[rows], self.lse_bhn[rows], out, lse)
                continue
            self.out_bhne = _begin(self.like_bhne, piece.queries, out, self.pieces)
            self.lse_bhn = lse.new_full(self.like_bhne.shape[:-1], float("-inf"))
            self.lse_bhn[rows] = lse

    @property
    def output(self) -> Tensor:
        """The output over all keys that came, (b, h, n, e)."""
        assert self.out_bhne is not None, "some keys came"
        return self.out_bhne


class Gradients:
    """The gradient of the queries so far, and what the gradients of any keys follow from, which come in `pieces`."""

    def __init__(self, dout_bhne: Tensor, q_bhne: Tensor, out_bhne: Tensor, lse_bhn: Tensor, pieces: int) -> None:
        self.dout, self.q, self.out, self.lse = dout_bhne, q_bhne, out_bhne, lse_bhn
        self.pieces = pieces
        self.dq_bhne: Tensor | None = None

    def add(self, pieces: Iterable[Piece], k_bgme: Tensor, v_bgme: Tensor, dk_bgme: Tensor, dv_bgme: Tensor) -> None:
        """Add what `pieces` give to the gradients of the queries, of these keys and of these values."""
        for piece in pieces:
            dk, dv = self.of(piece, k_bgme, v_bgme)
            dk_bgme[:, :, piece.keys] += dk
            dv_bgme[:, :, piece.keys] += dv

    def of(self, piece: Piece, k_bgme: Tensor, v_bgme: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the piece's keys and values, in the kernel's format; the queries' is added."""
        rows, keys = (slice(None), slice(None), piece.queries), (slice(None), slice(None), piece.keys)
        dout, q, out, lse = (x[rows] for x in (self.dout, self.q, self.out, self.lse))
        dq, dk, dv = backward(dout, q, k_bgme[keys], v_bgme[keys], out, lse, piece.mask)
        if self.dq_bhne is None:
            self.dq_bhne = _begin(self.q, piece.queries, dq, self.pieces)
        else:
            self.dq_bhne[rows] += dq
        return dk, dv

    @property
    def of_queries(self) -> Tensor:
        """The gradient of the queries, (b, h, n, e)."""
        assert self.dq_bhne is not None, "some keys came"
        return self.dq_bhne


@compiled_on_cuda
def merge_(out_bhne: Tensor, lse_bhn: Tensor, more_bhne: Tensor, more_lse_bhn: Tensor) -> None:
    """Add an output over other keys to `out_bhne` and its log-sum-exp, in place. One that saw no key has -inf there."""
    largest = torch.maximum(lse_bhn, more_lse_bhn)
    largest = torch.where(largest == float("-inf"), 0.0, largest)
    weight, more_weight = (lse_bhn - largest).exp(), (more_lse_bhn - largest).exp()
    total = weight + more_weight  # at least 1, or 0 if no key was seen at all
    share = 1 / total.clamp(min=1)
    out_bhne.copy_(out_bhne * (weight * share)[..., None] + more_bhne * (more_weight * share)[..., None])
    lse_bhn.copy_(largest + total.log())


def forward(q_bhne: Tensor, k_bgme: Tensor, v_bgme: Tensor, mask: PartMask) -> tuple[Tensor, Tensor]:
    """softmax over these keys -> (out_bhne, lse_bhn). A query that sees none of them has 0 and -inf.

    Query head i uses key/value head i // (h / g). The log-sum-exp is in at least fp32.
    """
    if isinstance(mask, Blocks):
        return _flex(q_bhne, k_bgme, v_bgme, mask)
    if q_bhne.is_cuda:
        if isinstance(mask, Dense):
            return _written_out(q_bhne, k_bgme, v_bgme, mask)
        kernel = cudnn_attention if _has_cudnn(q_bhne, k_bgme, v_bgme, mask) else flash_attention
        return kernel(q_bhne, k_bgme, v_bgme, causal=isinstance(mask, Causal))
    wide = product_dtype(q_bhne)
    q, k, v = q_bhne.to(wide), k_bgme.to(wide), v_bgme.to(wide)
    if isinstance(mask, Dense):
        out, lse = cpu_attention(q, k, v, causal=False, bias=mask.bias_bhss)
        # The kernel gives a row that sees nothing the log-sum-exp 0, which would count as one key.
        return out, torch.where(mask.sees_bhs, lse, float("-inf"))
    return cpu_attention(q, k, v, causal=isinstance(mask, Causal), bias=None)


def backward(
    dout_bhne: Tensor,
    q_bhne: Tensor,
    k_bgme: Tensor,
    v_bgme: Tensor,
    out_bhne: Tensor,
    lse_bhn: Tensor,
    mask: PartMask,
) -> tuple[Tensor, Tensor, Tensor]:
    """These keys' share in the gradient of q, and the gradients of k and v; output and log-sum-exp are the whole's."""
    if isinstance(mask, Blocks):
        return _flex_backward(dout_bhne, q_bhne, k_bgme, v_bgme, out_bhne, lse_bhn, mask)
    causal = isinstance(mask, Causal)
    if q_bhne.is_cuda:
        if isinstance(mask, Dense):
            return _written_out_backward(dout_bhne, q_bhne, k_bgme, v_bgme, out_bhne, lse_bhn, mask)
        cudnn = _has_cudnn(q_bhne, k_bgme, v_bgme, mask)
        kernel = cudnn_attention_backward if cudnn else flash_attention_backward
        return kernel(dout_bhne, q_bhne, k_bgme, v_bgme, out_bhne, lse_bhn, causal=causal)
    wide = product_dtype(q_bhne)
    dout, q, k, v, out = (x.to(wide) for x in (dout_bhne, q_bhne, k_bgme, v_bgme, out_bhne))
    bias = mask.bias_bhss if isinstance(mask, Dense) else None
    return cpu_attention_backward(dout, q, k, v, out, _finite(lse_bhn), causal=causal, bias=bias)


def _has_cudnn(q: Tensor, k: Tensor, v: Tensor, mask: PartMask) -> bool:
    """Larger heads have no cuDNN backward, and what is asked here inside autograd does not say that one will follow."""
    gqa = q.shape[1] != k.shape[1]
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, isinstance(mask, Causal), gqa)
    return q.shape[-1] <= 128 and torch.backends.cuda.can_use_cudnn_attention(asked)


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Blocks) -> tuple[Tensor, Tensor]:
    out, beside = flex(
        q,
        k,
        v,
        score_mod=mask.alibi,
        block_mask=mask.block_mask,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out, beside.lse


def _flex_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    """Through the piece's own forward, computed again: flex takes no other output and log-sum-exp than its own.

    With w = exp(lse_i - lse) the whole is the sum of w out_i, and lse the logarithm of the sum of exp(lse_i).
    """
    with torch.enable_grad():
        q_i, k_i, v_i = (x.detach().requires_grad_() for x in (q, k, v))
        out_i, lse_i = _flex(q_i, k_i, v_i, mask)
        dout_i, dlse_i = _share(dout, out, lse, out_i.detach(), lse_i.detach())
        dq, dk, dv = torch.autograd.grad((out_i, lse_i), (q_i, k_i, v_i), (dout_i, dlse_i))
    return dq, dk, dv


@compiled_on_cuda
def _share(dout: Tensor, out: Tensor, lse: Tensor, out_i: Tensor, lse_i: Tensor) -> tuple[Tensor, Tensor]:
    dout_i = dout * (lse_i - lse).exp()[..., None]
    dlse_i = (dout_i * (out_i.to(dout_i.dtype) - out)).sum(-1)
    return dout_i.to(out_i.dtype), dlse_i


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask: Dense) -> tuple[Tensor, Tensor]:
    """The formula, for fp64 on a GPU, for which there is no kernel."""
    scores_bgrnm = _scores(q, k, mask)
    lse = scores_bgrnm.logsumexp(-1)
    probabilities = (scores_bgrnm - _finite(lse)[..., None]).exp()
    return torch.einsum("bgrnm,bgme->bgrne", probabilities, v).flatten(1, 2), lse.flatten(1, 2)


def _written_out_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Dense
) -> tuple[Tensor, Tensor, Tensor]:
    groups = (k.shape[1], -1)
    q_r, dout_r, lse_r = (x.unflatten(1, groups) for x in (q, dout, _finite(lse)))
    probabilities = (_scores(q, k, mask) - lse_r[..., None]).exp()
    dv = torch.einsum("bgrnm,bgrne->bgme", probabilities, dout_r)
    delta = (dout * out).sum(-1).unflatten(1, groups)
    dscores = probabilities * (torch.einsum("bgrne,bgme->bgrnm", dout_r, v) - delta[..., None]) * q.shape[-1] ** -0.5
    dq = torch.einsum("bgrnm,bgme->bgrne", dscores, k).flatten(1, 2)
    return dq, torch.einsum("bgrnm,bgrne->bgme", dscores, q_r), dv


def _scores(q: Tensor, k: Tensor, mask: Dense) -> Tensor:
    """(b, g, h / g, n, m)"""
    scores = torch.einsum("bgrne,bgme->bgrnm", q.unflatten(1, (k.shape[1], -1)), k) * q.shape[-1] ** -0.5
    bias = mask.bias_bhss
    return scores + (bias.unflatten(1, (k.shape[1], -1)) if bias.shape[1] > 1 else bias[:, None])


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse == float("-inf"), 0.0, lse)
