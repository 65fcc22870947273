"""The dense feed-forward of a block: up, an activation, down, cut over tp by columns and by rows."""

# t tokens of this rank  T tokens of all ranks of tp  d model width  f feed-forward width / tp

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.run import Model
from fivefold.kernels.swiglu import swiglu
from fivefold.model.activations import Policy
from fivefold.model.part import Part
from fivefold.parallel.tensor import ColumnLinear, RowLinear


def feed_forward(model: Model, part: Part, policy: Policy) -> nn.Module:
    """The model's kind of dense feed-forward."""
    kind = SwiGLU if model.activation == "swiglu" else GELU
    return kind(model.hidden, model.ffn, model.bias, part, policy)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), gate and up as one product with alternate columns (Shazeer 2020): x_td -> x_td."""

    def __init__(self, hidden: int, width: int, bias: bool, part: Part, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.gate_up = ColumnLinear(hidden, 2 * width, bias, part.tp, part.deferral)
        self.down = RowLinear(width, hidden, bias, part.tp, part.deferral)

    def forward(self, x_td: Tensor) -> Tensor:
        hidden_Tf = self.policy.cheap(swiglu, self.gate_up(x_td))
        return self.down(hidden_Tf)


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x) by its tanh approximation."""
    return F.gelu(x, approximate="tanh")


class GELU(nn.Module):
    """down(gelu(up x)), the tanh approximation (Hendrycks & Gimpel 2016): x_td -> x_td."""

    def __init__(self, hidden: int, width: int, bias: bool, part: Part, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.up = ColumnLinear(hidden, width, bias, part.tp, part.deferral)
        self.down = RowLinear(width, hidden, bias, part.tp, part.deferral)

    def forward(self, x_td: Tensor) -> Tensor:
        hidden_Tf = self.policy.cheap(gelu, self.up(x_td))
        return self.down(hidden_Tf)
