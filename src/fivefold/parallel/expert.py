"""Expert parallelism: each rank of ep holds some of a layer's experts, and tokens travel to the ranks of theirs.

Splits the experts (dimension 0 of their weights); between layers nothing. Collectives: the ranks tell each other how
many rows they send, which is the one time a layer that the host waits for the device; then two uneven all-to-alls carry
the rows there and back, and a small one the gates; backward the reverse. A rank's copies of a token are added up where
the token came from. What does not depend on the experts can be computed while tokens travel. With one rank nothing
travels and the host does not wait.
Sources: Lepikhin et al. 2021 (GShard), Fedus et al. 2021.
"""

# t tokens of this rank  k choices of a token  r rows that this rank sends  n rows that it receives
# E all experts  e experts of a rank  d model width

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.kernels.expert_feed_forward import Rows
from fivefold.kernels.permute import collect, spread
from fivefold.kernels.routing import Sorted, counts_of, inverse
from fivefold.parallel.axis import Axis, Pending

Compute = Callable[[Tensor, Tensor, Rows], Tensor]
"""From tokens (n, d), gates (r,) and the rows of this rank's experts to their outputs (r, d), sorted by expert."""


def through_experts(
    x_td: Tensor,
    gates_tk: Tensor,
    choices: Sorted,
    ep: Axis,
    compute: Compute,
    meanwhile: Callable[[], Tensor] | None = None,
) -> Tensor:
    """The sum over each token's choices of what `compute` makes of them, wherever their experts are: (t, d).

    What `meanwhile` gives is added; it is computed while tokens travel. All ranks of ep must call this together.
    """
    index_r = choices.order_r // choices.places_tk.shape[1]
    rows = Rows(index_r, choices.places_tk, choices.ends_e)
    gates_r = _reordered(gates_tk.flatten(), choices.order_r, choices.places_tk.flatten())
    if ep.size == 1:
        out_rd, other_td = compute(x_td, gates_r, rows), None if meanwhile is None else meanwhile()
    else:
        out_rd, other_td = _elsewhere(spread(x_td, index_r, choices.places_tk), gates_r, rows, ep, compute, meanwhile)
    out_td = collect(out_rd, index_r[: len(out_rd)], choices.places_tk)
    return out_td if other_td is None else out_td + other_td


def _elsewhere(
    x_rd: Tensor, gates_r: Tensor, rows: Rows, ep: Axis, compute: Compute, meanwhile: Callable[[], Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """The output of each row that is not dropped, in the order of the rows, which are sorted by expert and so by rank;
    and `meanwhile`'s."""
    counts_re, there, back = _exchange_counts(rows.ends_e, ep)
    if (kept := sum(there)) < len(x_rd):  # dropped choices, which lie behind the others, stay
        x_rd, gates_r = x_rd[:kept], gates_r[:kept]
    travelling = [_Journey(ep, there, back) for _ in range(2)]
    x_nd, gates_n = (_Depart.apply(each, way) for each, way in zip((x_rd, gates_r), travelling, strict=True))
    other = None if meanwhile is None else meanwhile()
    x_nd, gates_n = (_Arrive.apply(each, way) for each, way in zip((x_nd, gates_n), travelling, strict=True))
    order_n = _by_expert(counts_re, len(x_nd))
    places_n = inverse(order_n)
    ends_e = counts_re.sum(0).cumsum(0).to(torch.int32)
    out_nd = compute(x_nd, _reordered(gates_n, order_n, places_n), Rows(order_n, places_n[:, None], ends_e))
    home = _Journey(ep, back, there)
    returning = _Depart.apply(spread(out_nd, places_n, order_n[:, None]), home)
    return _Arrive.apply(returning, home), other


def _exchange_counts(ends_E: Tensor, ep: Axis) -> tuple[Tensor, list[int], list[int]]:
    """The rows that come from each rank for each expert of this rank, (ranks, e), on the device; and on the host, how
    many rows go to each rank and come from it."""
    sent_re = counts_of(ends_E).long().view(ep.size, -1)
    counts_re = ep.start_all_to_all(sent_re.flatten(), *[[sent_re.shape[1]] * ep.size] * 2).wait().view_as(sent_re)
    there, back = torch.stack([sent_re.sum(1), counts_re.sum(1)]).tolist()
    return counts_re, there, back


def _by_expert(counts_re: Tensor, rows: int) -> Tensor:
    """The order that sorts `rows` received rows by expert, which come sorted by rank, and by expert within a rank."""
    starts_re = (counts_re.flatten().cumsum(0) - counts_re.flatten()).view_as(counts_re)
    length_er, start_er = counts_re.T.flatten(), starts_re.T.flatten()
    shift_er = start_er - (length_er.cumsum(0) - length_er)
    shift_n = torch.repeat_interleave(shift_er, length_er, output_size=rows)
    return torch.arange(rows, device=counts_re.device) + shift_n


class _Journey:
    """Rows under way between the ranks of ep: there in forward, and their gradients back in backward."""

    def __init__(self, ep: Axis, send: list[int], receive: list[int]) -> None:
        self.ep, self.send, self.receive = ep, send, receive
        self.pending: Pending | None = None

    def depart(self, x: Tensor) -> Tensor:
        """Send rows; what is returned is not there yet."""
        self.pending = self.ep.start_all_to_all(x, self.send, self.receive)
        return self.pending.result

    def depart_back(self, d_x: Tensor) -> None:
        """Send gradients of what arrived to where it came from."""
        self.pending = self.ep.start_all_to_all(d_x, self.receive, self.send)

    def arrive(self) -> Tensor:
        """What is under way, once it is there."""
        assert self.pending is not None, "nothing arrives that has not departed"
        pending, self.pending = self.pending, None
        return pending.wait()


class _Depart(torch.autograd.Function):
    """Gives rows that are not there yet: `_Arrive` waits for them."""

    @staticmethod
    def forward(ctx, x: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.depart(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_not_there: Tensor):
        return ctx.journey.arrive(), None


class _Arrive(torch.autograd.Function):
    """Waits for rows. In backward their gradients depart here, and are waited for in `_Depart`'s backward."""

    @staticmethod
    def forward(ctx, x: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.arrive()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_x: Tensor):
        ctx.journey.depart_back(d_x)
        return d_x, None


def _reordered(x_r: Tensor, order_r: Tensor, places_r: Tensor) -> Tensor:
    """x[order], of which `places` is the inverse."""
    return spread(x_r, order_r, places_r[:, None])
