"""Where tokens go whose experts are spread over ranks, and how their choices lie where they arrive.

A token visits each rank that has experts of it once. With it go messages, one for each choice that it has there: the
gate, and the choice's number, which says which of the visitors from here it belongs to. Visitors and messages are sent
in the order of the rows, so that they arrive sorted by rank, and messages by expert within a rank. On CUDA these are
few launches, since the device waits for the host just then.
"""

# t tokens  k choices of a token  r rows, one for each choice, sorted by expert  m tokens that arrive  n choices of them
# p ranks  e experts of a rank

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.kernels.routing import Sorted, inverse

INTEGERS = {4: torch.int32, 8: torch.int64}
"""By bytes of a number."""


class Visits(NamedTuple):
    """What is sent, in the order of the ranks that it goes to."""

    sources: Tensor
    """The token of each visit; behind these, since how many they are is known on the device alone, anything."""
    places_tk: Tensor
    """The visit to the rank of a choice, -1 where another choice of the token has it already."""
    messages_r: Tensor
    """Of each choice (r, 2): the bits of its gate, and its token among this rank's visitors, times k, plus its place
    among the token's choices; behind those that are kept, anything."""
    before: Tensor
    """As of `visits_before`."""


def visits(choices: Sorted, gates_r: Tensor, ranks: int) -> Visits:
    """The visits of each token to `ranks` ranks, which share out all experts of `choices`. No gradient."""
    if gates_r.is_cuda:
        from fivefold.kernels import visits_triton

        return visits_triton.visits(choices, gates_r.detach(), ranks)
    return reference_visits(choices, gates_r.detach(), ranks)


def visitors(choices: Sorted, before: Tensor, ranks: int) -> Tensor:
    """How many tokens visit each of `ranks` ranks, by the visits before each row: (p,)."""
    return _starts(choices, before, ranks).diff()


def _starts(choices: Sorted, before: Tensor, ranks: int) -> Tensor:
    """The first visit to each rank, and the end of the last's: (p + 1,)."""
    ends_p = choices.ends_e.view(ranks, -1)[:, -1]
    return before[torch.cat([ends_p.new_zeros(1), ends_p])]


def visits_before(choices: Sorted, ranks: int) -> Tensor:
    """The visits to `ranks` ranks by the rows before each row, and by all: (r + 1,). A visit belongs to the first row
    of a token's for its rank."""
    if choices.places_tk.is_cuda:
        from fivefold.kernels import visits_triton

        return visits_triton.visits_before(choices, ranks)
    visit_r = _are_visits(_first_rows(choices, ranks)[0])
    return torch.cat([visit_r.new_zeros(1), visit_r]).cumsum(0)


def _are_visits(first_r: Tensor) -> Tensor:
    """Whether each row is itself the first."""
    return first_r == torch.arange(len(first_r))


def _first_rows(choices: Sorted, ranks: int) -> tuple[Tensor, Tensor]:
    """Of each row the first of its token's rows for the same rank (r,), -1 if it is dropped; and the rank."""
    ends_p = choices.ends_e.view(ranks, -1)[:, -1].long()
    rank_tk = torch.searchsorted(ends_p, choices.places_tk, right=True)
    kept_tk = choices.places_tk >= 0
    same_tkk = (rank_tk[:, :, None] == rank_tk[:, None, :]) & kept_tk[:, None, :]
    rows_tkk = choices.places_tk[:, None, :].expand(same_tkk.shape)
    first_tk = rows_tkk.masked_fill(~same_tkk, torch.iinfo(torch.int64).max).amin(-1).masked_fill(~kept_tk, -1)
    return first_tk.flatten()[choices.order_r], rank_tk.flatten()[choices.order_r]


def reference_visits(choices: Sorted, gates_r: Tensor, ranks: int) -> Visits:
    """As `visits`."""
    k, integer = choices.places_tk.shape[1], INTEGERS[gates_r.element_size()]
    first_r, rank_r = _first_rows(choices, ranks)
    visit_r, before = _are_visits(first_r), visits_before(choices, ranks)
    sources = choices.order_r[visit_r] // k
    places = torch.full_like(choices.places_tk.flatten(), -1)
    places[choices.order_r[visit_r]] = torch.arange(len(sources))
    numbers_r = torch.zeros_like(first_r)
    kept_r = first_r >= 0
    visitor_r = before[first_r[kept_r]] - _starts(choices, before, ranks)[rank_r[kept_r]]
    numbers_r[kept_r] = visitor_r * k + choices.order_r[kept_r] % k
    messages_r = torch.stack([gates_r.contiguous().view(integer), numbers_r.to(integer)], 1)
    return Visits(sources, places.view_as(choices.places_tk), messages_r, before)


class Arrival(NamedTuple):
    """How many choices come for each expert from each rank, as running sums; experts outside, ranks inside."""

    ends_ep: Tensor
    """Where those of each expert and rank end, sorted by expert."""
    starts_ep: Tensor
    """Where they start as they arrive, sorted by rank."""
    firsts_p: Tensor
    """The first visitor from each rank."""
    ends_e: Tensor
    """Where each expert's end, int32."""

    @classmethod
    def of(cls, visitors_p: Tensor, counts_pe: Tensor) -> Arrival:
        """Of so many tokens from each rank, and so many choices of each expert."""
        starts_pe = (counts_pe.flatten().cumsum(0) - counts_pe.flatten()).view_as(counts_pe)
        ends_ep = counts_pe.T.flatten().cumsum(0).view_as(counts_pe.T)
        firsts_p = visitors_p.cumsum(0) - visitors_p
        return cls(ends_ep, starts_pe.T.contiguous(), firsts_p, ends_ep[:, -1].to(torch.int32))


class Arrived(NamedTuple):
    """Choices sorted by expert."""

    gates_n: Tensor
    index_n: Tensor
    """The token of each."""
    order_n: Tensor
    """Its number among the m x k."""
    places_mk: Tensor
    """Of each token the places of its choices, -1 for none."""
    inverse_n: Tensor
    """The place of each message."""


def arrived(messages: Tensor, dtype: torch.dtype, arrival: Arrival, m: int, k: int) -> Arrived:
    """The choices of m tokens that messages (n, 2) tell of; gates have the format `dtype`. No gradient."""
    if messages.is_cuda:
        from fivefold.kernels import visits_triton

        return visits_triton.arrived(messages, dtype, arrival, m, k)
    return reference_arrived(messages, dtype, arrival, m, k)


def reference_arrived(messages: Tensor, dtype: torch.dtype, arrival: Arrival, m: int, k: int) -> Arrived:
    """As `arrived`."""
    place_n, ends = torch.arange(len(messages)), arrival.ends_ep.flatten()
    pair_n = torch.searchsorted(ends, place_n, right=True)
    begins = torch.cat([ends.new_zeros(1), ends])
    message_n = place_n + (arrival.starts_ep.flatten() - begins[:-1])[pair_n]
    gates_n, number_n = messages[message_n].unbind(1)
    order_n = number_n.long() + arrival.firsts_p[pair_n % arrival.ends_ep.shape[1]] * k
    places_mk = order_n.new_full((m * k,), -1).scatter_(0, order_n, place_n).view(m, k)
    return Arrived(gates_n.contiguous().view(dtype), order_n // k, order_n, places_mk, inverse(message_n))
