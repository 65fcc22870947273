"""Expert parallelism: each rank of ep holds some of a layer's experts, and tokens travel to the ranks of theirs.

Splits the experts (dimension 0 of their weights); between layers nothing. Collectives: the ranks tell each other how
much they send, which is the one time a layer that the host waits for the device; then uneven all-to-alls carry the
tokens there and back, and small ones their gates and choices; backward the reverse. A token goes to each rank once,
however many of its experts are there, and comes back as the sum over them. Where ep reaches over nodes there are two
legs: to the node, once, and inside it to the ranks. What does not depend on the experts can be computed while tokens
travel. With one rank nothing travels and the host does not wait.
Sources: Lepikhin et al. 2021 (GShard), Fedus et al. 2021; DeepSeek-AI 2024 (once to each node).
"""

# t tokens of this rank  k choices of a token  r rows, one for each choice  s tokens that this rank sends: one for each
# token and rank that has experts of it  m tokens that it receives  n choices that it receives with them
# E experts of all ranks of a leg  e experts of a rank of it  p ranks of it  d model width

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold.kernels.expert_feed_forward import Rows
from fivefold.kernels.permute import collect, gather_rows, spread, sum_rows
from fivefold.kernels.routing import Sorted, counts_of
from fivefold.kernels.transfer import Reading
from fivefold.kernels.visits import Arrival, Visits, arrived, visitors, visits, visits_before
from fivefold.parallel.axis import Axis, Pending

Compute = Callable[[Tensor, Tensor, Rows], Tensor]
"""From tokens (m, d), gates (n,) and the rows of this rank's experts to their outputs (n, d), sorted by expert."""


def through_experts(
    x_td: Tensor,
    gates_tk: Tensor,
    choices: Sorted,
    legs: Sequence[Axis],
    compute: Compute,
    meanwhile: Callable[[], Tensor] | None = None,
) -> Tensor:
    """The sum over each token's choices of what `compute` makes of them, wherever their experts are: (t, d).

    `legs` are the ranks among which tokens travel, one axis after the other, of which the last are next to each other
    in the order of the experts; none if all experts are here. What `meanwhile` gives is added; it is computed while
    tokens travel. All ranks must call this together.
    """
    gates_r = spread(gates_tk.flatten(), choices.order_r, choices.places_tk.flatten()[:, None])
    if not legs:
        index_r = choices.order_r // choices.places_tk.shape[1]
        out_td = _here(x_td, gates_r, Rows(index_r, choices.places_tk, choices.ends_e), compute)
        return out_td if meanwhile is None else out_td + meanwhile()
    sent = visits(choices, gates_r, legs[0].size)  # before the host waits, so that the device has it by then
    out_td, other_td = _travel(x_td, gates_r, sent, _itinerary(choices, sent, legs), compute, meanwhile)
    return out_td if other_td is None else out_td + other_td


class Leg(NamedTuple):
    """What travels between this rank and the others of an axis."""

    axis: Axis
    tokens: list[int]
    """That go to each rank."""
    tokens_back: list[int]
    """That come from each rank, and go back there."""
    choices: list[int]
    choices_back: list[int]
    arrival: Arrival
    """How what comes lies, on the device."""


def _travel(
    x_td: Tensor,
    gates_r: Tensor,
    sent: Visits,
    legs: Sequence[Leg],
    compute: Compute,
    meanwhile: Callable[[], Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """The sum over each token's choices, and `meanwhile`'s."""
    leg, *further = legs
    sources_s, k = sent.sources[: sum(leg.tokens)], sent.places_tk.shape[1]
    passage = _Passage(leg)
    x_md, gates_n = _Depart.apply(x_td, gates_r, sources_s, sent.places_tk, sent.messages_r, passage)
    other = None if meanwhile is None else meanwhile()
    x_md, gates_n, index_n, order_n, places_mk = _Arrive.apply(x_md, gates_n, k, passage)
    if further:
        choices = Sorted(order_n, places_mk, leg.arrival.ends_e)
        sent_on = visits(choices, gates_n, further[0].axis.size)
        out_md, _ = _travel(x_md, gates_n, sent_on, further, compute, None)
    else:
        out_md = _here(x_md, gates_n, Rows(index_n, places_mk, leg.arrival.ends_e), compute)
    return _Return.apply(out_md, sources_s, sent.places_tk, leg), other


def _here(x_md: Tensor, gates_n: Tensor, rows: Rows, compute: Compute) -> Tensor:
    """The sum over each token's choices, all of experts of this rank."""
    return collect(compute(x_md, gates_n, rows), rows.index_r, rows.places_nk)


def _itinerary(choices: Sorted, sent: Visits, axes: Sequence[Axis]) -> list[Leg]:
    """What travels in each leg, which all ranks must ask together. The host waits for it.

    Each tells all others how many of its choices are for each expert, and how many of its tokens for each rank of the
    first leg's axis, then for each rank of the second's behind each of these, and so on.
    """
    sizes, me = [axis.size for axis in axes], [axis.rank for axis in axes]
    told = [counts_of(choices.ends_e), visitors(choices, sent.before, sizes[0])]
    for ranks in (prod(sizes[: leg + 1]) for leg in range(1, len(axes))):
        told.append(visitors(choices, visits_before(choices, ranks), ranks))
    heard = torch.cat(told)[None]
    for axis in reversed(axes):
        heard = axis.gather(heard)
    counts, *tokens = heard.split([len(each) for each in told], dim=1)

    numbers: list[Tensor] = []
    arriving: list[tuple[Tensor, Tensor]] = []
    for leg in range(len(axes)):
        tokens_to_p, tokens_of_p = _to_and_of(me, leg, tokens[leg].reshape(*sizes, *sizes[: leg + 1]))
        counts_to_pe, counts_of_pe = _to_and_of(me, leg, counts.reshape(*sizes, *sizes[: leg + 1], -1))
        numbers += [tokens_to_p, tokens_of_p, counts_to_pe.sum(1), counts_of_pe.sum(1)]
        arriving.append((tokens_of_p, counts_of_pe))
    reading = Reading(torch.cat(numbers))
    arrivals = [Arrival.of(*each) for each in arriving]  # the device has these to do until the host goes on
    on_host = iter(reading.wait())
    legs = []
    for axis, arrival in zip(axes, arrivals, strict=True):
        tokens_to, tokens_of, choices_to, choices_of = (list(islice(on_host, axis.size)) for _ in range(4))
        legs.append(Leg(axis, tokens_to, tokens_of, choices_to, choices_of, arrival))
    return legs


def _to_and_of(me: list[int], leg: int, told: Tensor) -> tuple[Tensor, Tensor]:
    """What this rank sends in a leg to each rank of its axis, and gets of each, from what every rank told.

    `told` has an axis for each leg of the ranks that told, and one for each leg up to this of the ranks told of. Before
    a leg a token is by the axes of those before at the rank that it goes to, wherever it is from, and by the others
    where it is from.
    """
    anywhere: tuple[slice | int, ...] = (slice(None),) * leg
    to = told[(*anywhere, *me[leg:], *me[:leg])]
    of = told[(*anywhere, slice(None), *me[leg + 1 :], *me[: leg + 1])]
    before = tuple(range(leg))
    return (to.sum(before), of.sum(before)) if before else (to, of)


class _Passage:
    """Tokens and the gates of their choices under way: there in forward, and their gradients back in backward."""

    def __init__(self, leg: Leg) -> None:
        self.leg = leg
        self.pending: list[Pending] = []

    def depart(self, x_sd: Tensor, messages: Tensor) -> None:
        """Send tokens, and a message for each choice."""
        axis, leg = self.leg.axis, self.leg
        self.pending = [
            axis.start_all_to_all(x_sd, leg.tokens, leg.tokens_back),
            axis.start_all_to_all(messages, leg.choices, leg.choices_back),
        ]

    def depart_back(self, d_x_md: Tensor, d_gates: Tensor) -> None:
        """Send gradients of what arrived to where it came from."""
        axis, leg = self.leg.axis, self.leg
        self.pending = [
            axis.start_all_to_all(d_x_md, leg.tokens_back, leg.tokens),
            axis.start_all_to_all(d_gates, leg.choices_back, leg.choices),
        ]

    def arrive(self) -> tuple[Tensor, Tensor]:
        """What is under way, once it is there."""
        assert self.pending, "nothing arrives that has not departed"
        (rows, others), self.pending = (each.wait() for each in self.pending), []
        return rows, others


class _Depart(torch.autograd.Function):
    """Gives tokens and gates that are not there yet: `_Arrive` waits for them."""

    @staticmethod
    def forward(
        ctx, x_td: Tensor, gates_r: Tensor, sources_s: Tensor, places_tk: Tensor, messages_r: Tensor, passage: _Passage
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places_tk)
        ctx.passage, ctx.rows = passage, len(gates_r)
        kept = sum(passage.leg.choices)  # dropped choices, which lie behind the others, stay
        passage.depart(gather_rows(x_td, sources_s), messages_r[:kept])
        return passage.pending[0].result, gates_r.new_empty(sum(passage.leg.choices_back))

    @staticmethod
    @once_differentiable
    def backward(ctx, d_not_there: Tensor, d_gates_not_there: Tensor):
        (places_tk,) = ctx.saved_tensors
        d_x_sd, d_gates = ctx.passage.arrive()
        if (dropped := ctx.rows - len(d_gates)) > 0:
            d_gates = torch.cat([d_gates, d_gates.new_zeros(dropped)])
        return sum_rows(d_x_sd, places_tk), d_gates, None, None, None, None


class _Arrive(torch.autograd.Function):
    """Waits for tokens and gates, and sorts these by expert: the tokens, their gates, and the rows of these.

    In backward their gradients depart here, and are waited for in `_Depart`'s backward.
    """

    @staticmethod
    def forward(ctx, x_md: Tensor, gates: Tensor, k: int, passage: _Passage) -> tuple[Tensor, ...]:
        x_md, messages = passage.arrive()
        gates_n, *rows, inverse_n = arrived(messages, gates.dtype, passage.leg.arrival, len(x_md), k)
        ctx.save_for_backward(inverse_n)
        ctx.passage = passage
        ctx.mark_non_differentiable(*rows)
        return x_md, gates_n, *rows

    @staticmethod
    @once_differentiable
    def backward(ctx, d_x_md: Tensor, d_gates_n: Tensor, *_: Tensor):
        (inverse_n,) = ctx.saved_tensors
        ctx.passage.depart_back(d_x_md, gather_rows(d_gates_n, inverse_n))
        return d_x_md, d_gates_n, None, None


class _Return(torch.autograd.Function):
    """Sends what came of the tokens home, and adds it up there."""

    @staticmethod
    def forward(ctx, out_md: Tensor, sources_s: Tensor, places_tk: Tensor, leg: Leg) -> Tensor:
        ctx.save_for_backward(sources_s)
        ctx.leg = leg
        return sum_rows(leg.axis.start_all_to_all(out_md, leg.tokens_back, leg.tokens).wait(), places_tk)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out_td: Tensor):
        (sources_s,), leg = ctx.saved_tensors, ctx.leg
        d_out_sd = gather_rows(d_out_td, sources_s)
        return leg.axis.start_all_to_all(d_out_sd, leg.tokens, leg.tokens_back).wait(), None, None, None
