"""The output projection and its loss in one, without ever holding all logits: the vocabulary loss in chunks of tokens.

A chunk's logits are made, turned into their own gradient at once, multiplied into the two gradients that are kept, and
forgotten, so nothing is computed twice. Logits for 8,192 tokens and 128,256 words would take 4.2 GB in fp32, the chunk
a fraction. Source: Hsu et al. 2024 (Liger kernels) for the idea; the arithmetic here is torch's.
"""

# t tokens (of a chunk, or of a rank)  T tokens of all ranks that share the vocabulary  d model width
# v vocabulary, padded; this rank's share of it

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.kernels.compiled import compiled_on_cuda
from fivefold.kernels.linear import Deferral, add_product, product_dtype

IGNORE = -100
"""Label of a position that has no target."""
CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
"""Tokens whose logits exist at one time: few fit a CPU's cache, many keep a GPU's products large."""
VOCAB_MULTIPLE = 128
"""A product whose width is no multiple of this is slow on GPUs, so the weight is padded to it."""


@dataclass(frozen=True)
class VocabularyShare:
    """The rows of the vocabulary's weight that this rank holds, and how it works with the ranks that hold the others.

    Between layers each of them holds a slice of the tokens (t), inside they compute on all of them (T).
    """

    rows: range
    """Which rows of the whole vocabulary's the weight holds."""
    counts: bool
    """Whether this rank's result counts the loss, which all of them know; exactly one does."""
    gather: Callable[[Tensor], Tensor]
    """(t, d) of each rank, joined: (T, d)."""
    reduce_scatter: Callable[[Tensor], Tensor]
    """The sum over the ranks of (T, d), of which each gets its slice (t, d)."""
    max_: Callable[[Tensor], Tensor]
    """The largest over the ranks, in place."""
    sum_: Callable[[Tensor], Tensor]
    """The sum over the ranks, in place."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    chunk_tokens: int | None = None,
    share: VocabularyShare | None = None,
    deferral: Deferral | None = None,
    factor: float = 1.0,
) -> Tensor:
    """SUM of -log softmax(hidden @ weight^T)[label] over all labels that are not IGNORE, in at least fp32.

    hidden (..., d), weight (vocabulary, d), labels (...). The gradients have the formats of hidden and weight; the
    weight's is summed over chunks in at least fp32. chunk_tokens is CHUNK_TOKENS of the device if None.
    With a share of the vocabulary: hidden (t, d), weight this rank's rows, labels (T,), and the sum over the ranks of
    the results is the loss.
    With a deferral the weight's gradient goes there in forward, times `factor` and the deferral's `loss_scale`, which
    the incoming gradient must be: no gradient of the weight's size is made for each microbatch.
    """
    chunk_tokens = chunk_tokens or CHUNK_TOKENS.get(hidden.device.type, CHUNK_TOKENS["cuda"])
    hidden_td, labels_T = hidden.flatten(0, -2), labels.flatten()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden_td, weight, labels_T, chunk_tokens, share, deferral, factor)
    padded_vd = _padded(weight, product_dtype(hidden))
    loss = hidden.new_zeros((), dtype=_wide(hidden))
    hidden_Td = hidden_td if share is None else share.gather(hidden_td)
    for h_td, y_t in zip(hidden_Td.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True):
        logits_tv = _logits(h_td, padded_vd, len(weight))
        loss += _losses(logits_tv, y_t) if share is None else _shared_softmax(logits_tv, y_t, share)[0]
    return loss if share is None or share.counts else torch.zeros_like(loss)


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward, for an incoming gradient of 1; backward scales them.

    The weight's is no activation but a gradient that waits, so it is not saved as one.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_td: Tensor,
        weight: Tensor,
        labels_T: Tensor,
        chunk_tokens: int,
        share: VocabularyShare | None,
        deferral: Deferral | None,
        factor: float,
    ) -> Tensor:
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        padded_vd = _padded(weight, product_dtype(hidden_td))
        loss = hidden_td.new_zeros((), dtype=_wide(hidden_td))
        hidden_Td = hidden_td if share is None else share.gather(hidden_td)
        d_hidden_Td = torch.empty_like(hidden_Td) if want_hidden else None
        keeps_weight = want_weight and deferral is None
        d_weight_vd = padded_vd.new_zeros(padded_vd.shape, dtype=_wide(weight)) if keeps_weight else None
        for start in range(0, len(labels_T), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            h_td, y_t = hidden_Td[rows].to(padded_vd.dtype), labels_T[rows]
            chunk_loss, d_logits_tv = _loss_and_gradient(_logits(h_td, padded_vd, len(weight)), y_t, share)
            labelled_t1 = (y_t != IGNORE)[:, None]  # the others drop out of these thin products, not of the wide one
            loss += chunk_loss
            if d_hidden_Td is not None:
                d_hidden_Td[rows] = (d_logits_tv @ padded_vd) * labelled_t1
            if want_weight and deferral is not None:
                d_known_tv = d_logits_tv[:, : len(weight)]
                deferral.sums.add_product(weight, d_known_tv.T, h_td * labelled_t1, factor * deferral.loss_scale)
            if d_weight_vd is not None:
                add_product(d_weight_vd, d_logits_tv.T, h_td * labelled_t1, d_weight_vd.dtype)
        if share is not None and d_hidden_Td is not None:
            d_hidden_Td = share.reduce_scatter(d_hidden_Td)
        ctx.save_for_backward(d_hidden_Td)
        ctx.spent = False
        ctx.d_weight = None if d_weight_vd is None else d_weight_vd[: len(weight)].to(weight.dtype)
        return loss if share is None or share.counts else torch.zeros_like(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor):
        (d_hidden_td,) = ctx.saved_tensors
        if ctx.spent:
            raise RuntimeError("backward ran twice through linear_cross_entropy, which keeps its gradients for one run")
        d_weight_vd, ctx.d_weight, ctx.spent = ctx.d_weight, None, True
        hidden = None if d_hidden_td is None else d_hidden_td * scale
        return hidden, None if d_weight_vd is None else d_weight_vd * scale, None, None, None, None, None


def _loss_and_gradient(logits_tv: Tensor, labels_t: Tensor, share: VocabularyShare | None) -> tuple[Tensor, Tensor]:
    """Sum of the chunk's losses, and the gradient of the logits this rank has, before labels that are IGNORE drop out.

    At a label it is softmax - 1, rounded after the subtraction: a confident model's 0.999 would be 1 in bf16.
    """
    if share is None:
        loss, d_logits_tv, d_target_t = _softmax(logits_tv, labels_t)
        d_logits_tv.scatter_(1, labels_t.clamp(min=0)[:, None], d_target_t[:, None])
        return loss, d_logits_tv
    loss, log_sum_t, log_p_t = _shared_softmax(logits_tv, labels_t, share)
    d_logits_tv = _probabilities(logits_tv, log_sum_t)
    place_t, here_t = _places(labels_t, share.rows)
    d_target_t = torch.where(here_t, torch.expm1(log_p_t).to(d_logits_tv.dtype), d_logits_tv[:, 0])
    d_logits_tv.scatter_(1, place_t[:, None], d_target_t[:, None])
    return loss, d_logits_tv


@compiled_on_cuda
def _losses(logits_tv: Tensor, labels_t: Tensor) -> Tensor:
    """Sum of the chunk's losses."""
    return F.cross_entropy(logits_tv.to(_wide(logits_tv)), labels_t, ignore_index=IGNORE, reduction="sum")


@compiled_on_cuda
def _softmax(logits_tv: Tensor, labels_t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the chunk's losses, its softmax in the logits' format, and at each label the gradient softmax - 1."""
    log_p_tv = F.log_softmax(logits_tv, dim=-1, dtype=_wide(logits_tv))
    log_p_t = log_p_tv.gather(1, labels_t.clamp(min=0)[:, None]).squeeze(1)
    loss = -torch.where(labels_t == IGNORE, 0.0, log_p_t).sum()
    return loss, log_p_tv.exp_().to(logits_tv.dtype), torch.expm1(log_p_t).to(logits_tv.dtype)


def _shared_softmax(logits_tv: Tensor, labels_t: Tensor, share: VocabularyShare) -> tuple[Tensor, Tensor, Tensor]:
    """Of the whole vocabulary: the sum of the losses, each token's log of its normalizer, its label's log p."""
    highest_t = share.max_(_highest(logits_tv))
    place_t, here_t = _places(labels_t, share.rows)
    sums_2t = share.sum_(_sum_and_target(logits_tv, highest_t, place_t, here_t))
    log_sum_t = sums_2t[0].log() + highest_t
    log_p_t = sums_2t[1] - log_sum_t
    return -torch.where(labels_t == IGNORE, 0.0, log_p_t).sum(), log_sum_t, log_p_t


@compiled_on_cuda
def _highest(logits_tv: Tensor) -> Tensor:
    """The largest logit of each token, in at least fp32."""
    return logits_tv.amax(1).to(_wide(logits_tv))


@compiled_on_cuda
def _sum_and_target(logits_tv: Tensor, highest_t: Tensor, place_t: Tensor, here_t: Tensor) -> Tensor:
    """(2, t): the sum of exp(logit - highest), and the label's logit, 0 where another rank has it."""
    wide_tv = logits_tv.to(highest_t.dtype)
    target_t = wide_tv.gather(1, place_t[:, None]).squeeze(1)
    return torch.stack([(wide_tv - highest_t[:, None]).exp().sum(1), torch.where(here_t, target_t, 0.0)])


@compiled_on_cuda
def _probabilities(logits_tv: Tensor, log_sum_t: Tensor) -> Tensor:
    """Softmax over the whole vocabulary of the logits that this rank has, in their format."""
    return (logits_tv.to(log_sum_t.dtype) - log_sum_t[:, None]).exp().to(logits_tv.dtype)


def _places(labels_t: Tensor, rows: range) -> tuple[Tensor, Tensor]:
    """The column of each label among this rank's, 0 where it is none of them, and whether it is one."""
    here_t = (labels_t >= rows.start) & (labels_t < rows.stop)
    return (labels_t - rows.start).where(here_t, 0), here_t


def _logits(h_td: Tensor, padded_vd: Tensor, vocab: int) -> Tensor:
    logits_tv = h_td.to(padded_vd.dtype) @ padded_vd.T
    logits_tv[:, vocab:] = float("-inf")
    return logits_tv


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight with its rows padded to VOCAB_MULTIPLE; itself if that divides them."""
    missing = -len(weight) % VOCAB_MULTIPLE
    return F.pad(weight.to(dtype), (0, 0, 0, missing)) if missing else weight.to(dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
