"""The feed-forward of many experts at once: each row goes through the expert that it was sent to, weighted by its gate.

One function with a backward of its own, so that little is kept: the tokens and not their copies for each expert, and
the first product. Backward takes the copies again and computes the activation again, which moves bytes but multiplies
nothing. As in `linear`, the gradients of the weights may go to a `Deferral`.
"""

# n tokens  k places of a token  r rows, one for each choice of a token, sorted by expert  e experts of this rank
# d model width  f width of an expert

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.kernels.gated_swiglu import gated_swiglu, gated_swiglu_backward
from fivefold.kernels.grouped import grouped_multiply, grouped_multiply_transposed, grouped_weight_gradient
from fivefold.kernels.linear import Deferral, GradientTotals
from fivefold.kernels.permute import gather_rows, sum_rows


class Rows(NamedTuple):
    """Where the rows of each expert come from."""

    index_r: Tensor
    """The token of each row."""
    places_nk: Tensor
    """The rows of each token, -1 for none."""
    ends_e: Tensor
    """Where each expert's rows end, int32. What comes of rows behind the last is undefined: they are no expert's."""


@dataclass(frozen=True)
class GroupedWeightGradient:
    """The gradient of the experts' weights in one product, not computed yet."""

    weight: Tensor
    d_out_ro: Tensor
    inputs: Tensor
    index_r: Tensor | None
    """Which of the inputs each row is; None if they are the rows."""
    ends_e: Tensor

    def start(self) -> None:
        """Nothing has to come from elsewhere."""

    def add_to(self, totals: GradientTotals) -> None:
        """Compute, and add to the total of the weight."""
        rows = self.inputs if self.index_r is None else gather_rows(self.inputs, self.index_r)
        totals.add_grouped_product(self.weight, self.d_out_ro, rows, self.ends_e)


def expert_feed_forward(
    x_nd: Tensor, gates_r: Tensor, rows: Rows, gate_up_e2fd: Tensor, down_edf: Tensor, deferral: Deferral | None = None
) -> Tensor:
    """gates x down(silu(gate x) * up x) of each row, by its expert's weights: (r, d), in the order of the rows.

    gates_r are in at least fp32. With a deferral the gradients of the weights go there.
    """
    return _ExpertFeedForward.apply(x_nd, gates_r, *rows, gate_up_e2fd, down_edf, deferral)


class _ExpertFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x_nd: Tensor,
        gates_r: Tensor,
        index_r: Tensor,
        places_nk: Tensor,
        ends_e: Tensor,
        gate_up_e2fd: Tensor,
        down_edf: Tensor,
        deferral: Deferral | None,
    ) -> Tensor:
        hidden_r2f = grouped_multiply(gather_rows(x_nd, index_r), gate_up_e2fd, ends_e)
        ctx.save_for_backward(x_nd, gates_r, index_r, places_nk, ends_e, hidden_r2f, gate_up_e2fd, down_edf)
        ctx.weights, ctx.deferral = (gate_up_e2fd, down_edf), deferral
        return grouped_multiply(gated_swiglu(hidden_r2f, gates_r), down_edf, ends_e)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out_rd: Tensor):
        x_nd, gates_r, index_r, places_nk, ends_e, hidden_r2f, gate_up_e2fd, down_edf = ctx.saved_tensors
        gate_up, down = ctx.weights
        d_out_rd = d_out_rd.contiguous()
        d_activated_rf = grouped_multiply_transposed(d_out_rd, down_edf, ends_e)
        d_hidden_r2f, d_gates_r, activated_rf = gated_swiglu_backward(hidden_r2f, gates_r, d_activated_rf)
        of_down = GroupedWeightGradient(down, d_out_rd, activated_rf, None, ends_e)
        of_gate_up = GroupedWeightGradient(gate_up, d_hidden_r2f, x_nd, index_r, ends_e)
        d_x_nd = sum_rows(grouped_multiply_transposed(d_hidden_r2f, gate_up_e2fd, ends_e), places_nk)
        if ctx.deferral is not None:
            ctx.deferral.put(of_down)
            ctx.deferral.put(of_gate_up)
            return d_x_nd, d_gates_r, None, None, None, None, None, None
        d_down_edf = grouped_weight_gradient(d_out_rd, activated_rf, ends_e)
        d_gate_up_e2fd = grouped_weight_gradient(d_hidden_r2f, gather_rows(x_nd, index_r), ends_e)
        return d_x_nd, d_gates_r, None, None, None, d_gate_up_e2fd, d_down_edf, None
