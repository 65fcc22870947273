"""The output projection and its loss in one, without ever holding all logits: the vocabulary loss in chunks of tokens.

A chunk's logits are made, turned into their own gradient at once, multiplied into the two gradients that are kept, and
forgotten, so nothing is computed twice. Logits for 8,192 tokens and 128,256 words would take 4.2 GB in fp32, the chunk
a fraction. Source: Hsu et al. 2024 (Liger kernels) for the idea; the arithmetic here is torch's.
"""

# t tokens (of a chunk)  d model width  v vocabulary, padded

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.kernels.compiled import compiled_on_cuda
from fivefold.kernels.linear import product_dtype

IGNORE = -100
"""Label of a position that has no target."""
CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
"""Tokens whose logits exist at one time: few fit a CPU's cache, many keep a GPU's products large."""
VOCAB_MULTIPLE = 128
"""A product whose width is no multiple of this is slow on GPUs, so the weight is padded to it."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int | None = None) -> Tensor:
    """SUM of -log softmax(hidden @ weight^T)[label] over all labels that are not IGNORE, in at least fp32.

    hidden (..., d), weight (vocabulary, d), labels (...). The gradients have the formats of hidden and weight; the
    weight's is summed over chunks in at least fp32. chunk_tokens is CHUNK_TOKENS of the device if None.
    """
    chunk_tokens = chunk_tokens or CHUNK_TOKENS.get(hidden.device.type, CHUNK_TOKENS["cuda"])
    hidden_td, labels_t = hidden.flatten(0, -2), labels.flatten()
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden_td, weight, labels_t, chunk_tokens)
    padded_vd = _padded(weight, product_dtype(hidden))
    loss = hidden.new_zeros((), dtype=_wide(hidden))
    for h_td, y_t in zip(hidden_td.split(chunk_tokens), labels_t.split(chunk_tokens), strict=True):
        loss += _losses(_logits(h_td, padded_vd, len(weight)), y_t)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward, for an incoming gradient of 1; backward scales them."""

    @staticmethod
    def forward(ctx, hidden_td: Tensor, weight: Tensor, labels_t: Tensor, chunk_tokens: int) -> Tensor:
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        padded_vd = _padded(weight, product_dtype(hidden_td))
        loss = hidden_td.new_zeros((), dtype=_wide(hidden_td))
        d_hidden_td = torch.empty_like(hidden_td) if want_hidden else None
        d_weight_vd = padded_vd.new_zeros(padded_vd.shape, dtype=_wide(weight)) if want_weight else None
        for start in range(0, len(labels_t), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            h_td, y_t = hidden_td[rows].to(padded_vd.dtype), labels_t[rows]
            chunk_loss, d_logits_tv, d_target_t = _losses_and_gradient(_logits(h_td, padded_vd, len(weight)), y_t)
            d_logits_tv.scatter_(1, y_t.clamp(min=0)[:, None], d_target_t[:, None])
            labelled_t1 = (y_t != IGNORE)[
                :, None
            ]  # the other rows drop out of these thin products, not of the wide one
            loss += chunk_loss
            if d_hidden_td is not None:
                d_hidden_td[rows] = (d_logits_tv @ padded_vd) * labelled_t1
            if d_weight_vd is not None:
                _accumulate(d_weight_vd, d_logits_tv.T, h_td * labelled_t1)
        ctx.save_for_backward(d_hidden_td, None if d_weight_vd is None else d_weight_vd[: len(weight)].to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor):
        d_hidden_td, d_weight_vd = ctx.saved_tensors
        hidden = None if d_hidden_td is None else d_hidden_td * scale
        return hidden, None if d_weight_vd is None else d_weight_vd * scale, None, None


@compiled_on_cuda
def _losses(logits_tv: Tensor, labels_t: Tensor) -> Tensor:
    """Sum of the chunk's losses."""
    return F.cross_entropy(logits_tv.to(_wide(logits_tv)), labels_t, ignore_index=IGNORE, reduction="sum")


@compiled_on_cuda
def _losses_and_gradient(logits_tv: Tensor, labels_t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the chunk's losses, its softmax in the logits' format, and the gradient at each label: softmax there - 1.

    softmax - 1 is rounded after the subtraction, since a confident model's 0.999 would be 1 in bf16.
    """
    log_p_tv = F.log_softmax(logits_tv, dim=-1, dtype=_wide(logits_tv))
    log_p_t = log_p_tv.gather(1, labels_t.clamp(min=0)[:, None]).squeeze(1)
    loss = -torch.where(labels_t == IGNORE, 0.0, log_p_t).sum()
    return loss, log_p_tv.exp_().to(logits_tv.dtype), torch.expm1(log_p_t).to(logits_tv.dtype)


def _logits(h_td: Tensor, padded_vd: Tensor, vocab: int) -> Tensor:
    logits_tv = h_td.to(padded_vd.dtype) @ padded_vd.T
    logits_tv[:, vocab:] = float("-inf")
    return logits_tv


def _padded(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight with its rows padded to VOCAB_MULTIPLE; itself if that divides them."""
    missing = -len(weight) % VOCAB_MULTIPLE
    return F.pad(weight.to(dtype), (0, 0, 0, missing)) if missing else weight.to(dtype)


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where total may be wider than the factors."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
