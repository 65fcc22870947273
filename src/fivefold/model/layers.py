"""The norms of a block: modules that hold weights, thin around the functions of `kernels`."""

# d model width

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivefold.config.run import Model
from fivefold.kernels.layer_norm import add_layer_norm, layer_norm
from fivefold.kernels.rms_norm import add_rms_norm, rms_norm
from fivefold.model.activations import KEEP, Policy


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; it has a weight and never a bias."""

    def __init__(self, width: int, eps: float, policy: Policy = KEEP) -> None:
        super().__init__()
        self.eps, self.policy = eps, policy
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.policy.cheap(rms_norm, x, self.weight, self.eps)

    def after_adding(self, x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """x + update, and its norm."""
        return self.policy.cheap(add_rms_norm, x, update, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Layer norm over the last dimension, with or without a bias."""

    def __init__(self, width: int, eps: float, bias: bool, policy: Policy = KEEP) -> None:
        super().__init__()
        self.eps, self.policy = eps, policy
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.policy.cheap(layer_norm, x, self.weight, self.bias, self.eps)

    def after_adding(self, x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """x + update, and its norm."""
        return self.policy.cheap(add_layer_norm, x, update, self.weight, self.bias, self.eps)


def norm(model: Model, policy: Policy = KEEP) -> RMSNorm | LayerNorm:
    """The model's kind of norm, over the residual stream (..., d)."""
    if model.norm == "rmsnorm":
        return RMSNorm(model.hidden, model.norm_eps, policy)
    return LayerNorm(model.hidden, model.norm_eps, model.bias, policy)
