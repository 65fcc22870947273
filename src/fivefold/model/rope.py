"""Rotary frequencies: one for each pair of channels that turn, and how each kind of scaling stretches them.

All channels of a head turn, with latent attention `model.mla.rotated` of them. Computed in the order in which
transformers does it, so that fp32 gives the same bits. Sources: Su et al. 2021 (RoPE); Chen et al. 2023 (linear);
Grattafiori et al. 2024 and Meta's release (llama3); Peng et al. 2023 (yarn).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fivefold.config.run import Model, RopeScaling
from fivefold.errors import UserError


def frequencies(model: Model, dtype: torch.dtype) -> Tensor:
    """(channels that turn / 2,) radians a token, on the CPU, in `dtype` (at least fp32)."""
    exponents = torch.arange(0, _channels(model), 2, dtype=dtype, device="cpu") / _channels(model)
    periods = model.rope_theta**exponents
    scaling = model.rope_scaling
    if scaling is None:
        return 1.0 / periods
    if scaling.type == "linear":
        return 1.0 / periods / scaling.factor
    stretch = _llama3 if scaling.type == "llama3" else _yarn
    return stretch(periods, scaling, _original_context(scaling), model)


def attention_factor(model: Model) -> float:
    """What cosine and sine are multiplied by: 1, or with yarn 0.1 ln(factor) + 1 unless other factors are given."""
    scaling = model.rope_scaling
    if scaling is None or scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _temperature(scaling, scaling.mscale) / _temperature(scaling, scaling.mscale_all_dim)
    return _temperature(scaling, 1.0)


def score_factor(model: Model) -> float:
    """What latent attention's scores are multiplied by beside 1 / sqrt(width): 1, unless yarn says otherwise."""
    scaling = model.rope_scaling
    if scaling is None or scaling.type != "yarn" or not scaling.mscale_all_dim:
        return 1.0
    return _temperature(scaling, scaling.mscale_all_dim) ** 2


def _channels(model: Model) -> int:
    """Channels of a head that turn."""
    return model.head_size if model.mla is None else model.mla.rotated


def _temperature(scaling: RopeScaling, weight: float) -> float:
    return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _llama3(periods: Tensor, scaling: RopeScaling, original: int, model: Model) -> Tensor:
    """Wavelengths that fit often into the original context stay, long ones are stretched, those between are blended."""
    plain = 1.0 / periods
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = (original / wavelengths - low) / (high - low)
    blended = (1 - share) * plain / scaling.factor + share * plain
    stretched = torch.where(wavelengths > original / low, plain / scaling.factor, blended)
    return torch.where(wavelengths < original / high, plain, stretched)


def _yarn(periods: Tensor, scaling: RopeScaling, original: int, model: Model) -> Tensor:
    """Channels that turn more than beta_fast times in the original context stay, those below beta_slow stretch."""

    def channel(turns: float) -> float:
        return _channels(model) * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    first = max(math.floor(channel(scaling.beta_fast)), 0)
    last = min(math.ceil(channel(scaling.beta_slow)), _channels(model) - 1)
    width = last - first if last != first else 0.001
    ramp = ((torch.arange(len(periods), dtype=periods.dtype, device="cpu") - first) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _original_context(scaling: RopeScaling) -> int:
    if scaling.original_context is None:
        raise UserError(
            f"model.rope_scaling of type {scaling.type} needs original_context: "
            "the tokens of context that the model was trained with before"
        )
    return scaling.original_context
