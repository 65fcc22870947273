"""Tensor and sequence parallelism: the weights of a layer are cut over the ranks of tp, the tokens between layers too.

Between layers each rank holds a slice of the tokens, x_td, so that norms and residual additions are shared as well. A
column layer gathers the tokens and computes its rows of the output; a row layer adds up the ranks' partial outputs and
leaves each rank its slice. Collectives: one all-gather before a column layer, one reduce-scatter after a row layer;
backward the reverse, and one all-gather more for each column layer, which saves only its slice of the input and not
what it gathered. With one rank each layer is an ordinary one.
Sources: Shoeybi et al. 2019 (Megatron-LM), Korthikanti et al. 2022 (sequence parallelism).
"""

# t tokens of this rank  T tokens of all ranks of tp = t x tp  d model width  i input width  o output width of this rank

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fivefold.kernels.cross_entropy import VocabularyShare
from fivefold.kernels.linear import Deferral, WeightGradient, linear, look_up, multiply
from fivefold.parallel.axis import ALONE, Axis
from fivefold.parallel.overlap import gather_multiply, start_multiply_scatter
from fivefold.parallel.state import Cut, ShardedParameter

JOINED = 2**22
"""Elements of partial gradients that are added up together, 16 MiB of fp32."""


def piece(size: int, axis: Axis) -> range:
    """Which of `size` rows the rank holds: the pieces of torch.chunk, of which the last may be smaller, or empty."""
    length = -(-size // axis.size)
    return range(min(axis.rank * length, size), min((axis.rank + 1) * length, size))


class ColumnLinear(nn.Module):
    """x_ti -> (x W^T + b)_To with the rows of W, and so the columns of the output, cut over tp."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, tp: Axis = ALONE, deferral: Deferral | None = None
    ) -> None:
        super().__init__()
        self.tp, self.deferral = tp, deferral
        rows = len(piece(outputs, tp))
        self.weight = nn.Parameter(torch.empty(rows, inputs))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.cuts = {"weight": Cut(0, outputs), "bias": Cut(0, outputs)}

    def forward(self, x_ti: Tensor) -> Tensor:
        if self.tp.size == 1:
            return linear(x_ti, self.weight, self.bias, self.deferral)
        return _Column.apply(x_ti, self.weight, self.bias, self.tp, self.deferral)


class RowLinear(nn.Module):
    """x_Ti -> (x W^T + b)_to with the columns of W cut over tp, as its input is; the bias is whole on every rank."""

    def __init__(
        self, inputs: int, outputs: int, bias: bool, tp: Axis = ALONE, deferral: Deferral | None = None
    ) -> None:
        super().__init__()
        self.tp, self.deferral = tp, deferral
        self.weight = nn.Parameter(torch.empty(outputs, len(piece(inputs, tp))))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.cuts = {"weight": Cut(1, inputs)}

    def forward(self, x_Ti: Tensor) -> Tensor:
        if self.tp.size == 1:
            return linear(x_Ti, self.weight, self.bias, self.deferral)
        y_to = _Row.apply(x_Ti, self.weight, self.tp, self.deferral)
        return y_to if self.bias is None else y_to + self.bias


class WholeLinear(nn.Module):
    """x_ti -> (x W^T)_to with the whole W on every rank of tp, which applies it to its own tokens.

    For outputs that are narrower than x: to gather them costs less than to gather x. W's gradient is a partial sum.
    """

    def __init__(self, inputs: int, outputs: int, deferral: Deferral | None = None) -> None:
        super().__init__()
        self.deferral = deferral
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x_ti: Tensor) -> Tensor:
        return linear(x_ti, self.weight, None, self.deferral)


class Embedding(nn.Module):
    """tokens_T -> x_td with the vocabulary's rows cut over tp: each rank looks up what it has, and the sum is complete.

    One reduce-scatter forward, one all-gather backward.
    """

    def __init__(self, vocabulary: int, width: int, tp: Axis = ALONE, deferral: Deferral | None = None) -> None:
        super().__init__()
        self.tp, self.deferral = tp, deferral
        self.rows = piece(vocabulary, tp)
        self.weight = nn.Parameter(torch.empty(len(self.rows), width))
        self.cuts = {"weight": Cut(0, vocabulary)}

    def forward(self, tokens_T: Tensor) -> Tensor:
        if self.tp.size == 1:
            return look_up(tokens_T, self.weight, self.deferral)
        place_T = tokens_T - self.rows.start
        elsewhere_T = (place_T < 0) | (place_T >= len(self.rows))
        found_Td = look_up(place_T.masked_fill(elsewhere_T, 0), self.weight, self.deferral)
        return _AddUp.apply(found_Td.masked_fill(elsewhere_T[:, None], 0), self.tp)


def gather_sequence(x_ti: Tensor, tp: Axis) -> Tensor:
    """The tokens of all ranks of tp, x_Ti: one all-gather forward, one reduce-scatter backward."""
    return x_ti if tp.size == 1 else _Gathered.apply(x_ti, tp)


def vocabulary_share(size: int, tp: Axis) -> VocabularyShare | None:
    """How the ranks of tp work together on the loss over a vocabulary of `size`; None if one rank has all of it."""
    if tp.size == 1:
        return None
    return VocabularyShare(piece(size, tp), tp.rank == 0, tp.gather, tp.reduce_scatter, tp.max_, tp.sum_)


def sum_partial(parameters: Iterable[ShardedParameter], gradients: Iterable[Tensor], tp: Axis) -> None:
    """Complete the gradients of parameters that every rank of tp used on its own tokens, in place.

    In at least fp32. Small ones, such as all norms of a model, are joined to one all-reduce.
    """
    for group in _joinable(gradient for p, gradient in zip(parameters, gradients, strict=True) if p.partial):
        wide = torch.promote_types(group[0].dtype, torch.float32)
        if len(group) == 1 and group[0].dtype == wide:
            tp.sum_(group[0])
            continue
        joined = tp.sum_(torch.cat([gradient.flatten().to(wide) for gradient in group]))
        for gradient, total in zip(group, joined.split([gradient.numel() for gradient in group]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _joinable(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The gradients in groups of at most JOINED elements, or of one: those are copied together, a long one is not."""
    group: list[Tensor] = []
    elements = 0
    for gradient in gradients:
        if group and elements + gradient.numel() > JOINED:
            yield group
            group, elements = [], 0
        group.append(gradient)
        elements += gradient.numel()
    if group:
        yield group


class _Column(torch.autograd.Function):
    """Saves the slice x_ti; backward gathers it again while the input's gradient is computed, and sends that while the
    weight's is, or when a weight gradient that waits has its turn."""

    @staticmethod
    def forward(
        ctx, x_ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None, tp: Axis, deferral: Deferral | None
    ) -> Tensor:
        ctx.save_for_backward(x_ti, weight_oi)
        ctx.tp, ctx.parameters, ctx.deferral = tp, (weight_oi, bias_o), deferral
        y_To, _ = gather_multiply(x_ti, weight_oi.T, tp)
        return y_To if bias_o is None else y_To.add_(bias_o)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y_To: Tensor):
        x_ti, weight_oi = ctx.saved_tensors
        if ctx.deferral is not None:
            weight, bias = ctx.parameters
            gradient = WeightGradient(weight, bias, d_y_To, x_ti, ctx.tp.start_gather)
            ctx.deferral.announce(gradient)
            d_x = start_multiply_scatter(d_y_To, weight_oi, ctx.tp)
            ctx.deferral.put(gradient)
            return d_x.wait(), None, None, None, None
        gathered = ctx.tp.start_gather(x_ti)
        d_x = start_multiply_scatter(d_y_To, weight_oi, ctx.tp)
        d_weight_oi = multiply(d_y_To.T, gathered.wait())
        return d_x.wait(), d_weight_oi, d_y_To.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _Row(torch.autograd.Function):
    """The bias is not in here: each rank of tp adds it to its own slice."""

    @staticmethod
    def forward(ctx, x_Ti: Tensor, weight_oi: Tensor, tp: Axis, deferral: Deferral | None) -> Tensor:
        ctx.save_for_backward(x_Ti, weight_oi)
        ctx.tp, ctx.weight, ctx.deferral = tp, weight_oi, deferral
        return start_multiply_scatter(x_Ti, weight_oi.T, tp).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y_to: Tensor):
        x_Ti, weight_oi = ctx.saved_tensors
        d_x_Ti, d_y_To = gather_multiply(d_y_to, weight_oi, ctx.tp)
        if ctx.deferral is not None:
            ctx.deferral.put(WeightGradient(ctx.weight, None, d_y_To, x_Ti))
            return d_x_Ti, None, None, None
        return d_x_Ti, multiply(d_y_To.T, x_Ti), None, None


class _Gathered(torch.autograd.Function):
    """Every rank's tokens on every rank: (t, i) -> (T, i)."""

    @staticmethod
    def forward(ctx, x_ti: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return tp.gather(x_ti)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_Ti: Tensor):
        return ctx.tp.reduce_scatter(d_Ti), None


class _AddUp(torch.autograd.Function):
    """Each rank's slice of the sum over tp: (T, d) -> (t, d)."""

    @staticmethod
    def forward(ctx, partial_Td: Tensor, tp: Axis) -> Tensor:
        ctx.tp = tp
        return tp.reduce_scatter(partial_Td)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_td: Tensor):
        return ctx.tp.gather(d_td), None
