"""Visits and what arrives as Triton kernels, for CUDA; imported when the first CUDA tensor comes."""

# t tokens  k choices of a token  r rows, one for each choice, sorted by expert  m tokens that arrive  n choices of them
# p ranks  e experts of a rank

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.kernels.routing import Sorted
from fivefold.kernels.visits import INTEGERS, Arrival, Arrived, Visits

BLOCK = 256


def visits(choices: Sorted, gates_r: Tensor, ranks: int) -> Visits:
    """As `fivefold.kernels.visits.visits`."""
    (t, k), rows = choices.places_tk.shape, len(choices.order_r)
    before = visits_before(choices, ranks)
    sources = before.new_empty(t * min(k, ranks))
    places = torch.full_like(choices.places_tk, -1)
    bits_r = gates_r.contiguous().view(INTEGERS[gates_r.element_size()])
    messages = bits_r.new_empty(rows, 2)
    if rows:
        _visits[(triton.cdiv(rows, BLOCK),)](
            *choices, bits_r, before, sources, places, messages, rows, *_ranks(choices, ranks), k, BLOCK
        )
    return Visits(sources, places, messages, before)


def visits_before(choices: Sorted, ranks: int) -> Tensor:
    """As `fivefold.kernels.visits.visits_before`."""
    rows, k = len(choices.order_r), choices.places_tk.shape[1]
    visit = choices.order_r.new_empty(rows + 1, dtype=torch.int32)
    grid = (triton.cdiv(rows + 1, BLOCK),)
    _count[grid](*choices, visit, rows, *_ranks(choices, ranks), k, BLOCK)
    return visit.cumsum(0)


def arrived(messages: Tensor, dtype: torch.dtype, arrival: Arrival, m: int, k: int) -> Arrived:
    """As `fivefold.kernels.visits.arrived`."""
    n, (experts, ranks) = len(messages), arrival.ends_ep.shape
    gates = messages.new_empty(n)
    numbers = arrival.ends_ep.new_empty(3, n)
    places = arrival.ends_ep.new_full((m, k), -1)
    if n:
        pairs = experts * ranks
        _arrived[(triton.cdiv(n, BLOCK),)](
            messages, arrival.ends_ep, arrival.starts_ep, arrival.firsts_p, gates, numbers, places, n, pairs, ranks, k,
            pairs.bit_length(), BLOCK,
        )  # fmt: skip
    return Arrived(gates.view(dtype), numbers[0], numbers[1], places, numbers[2])


def _ranks(choices: Sorted, ranks: int) -> tuple[int, int, int]:
    """The ranks, the experts of each, and the steps in which the rank of a row is found."""
    return ranks, len(choices.ends_e) // ranks, ranks.bit_length()


@triton.jit
def _count(order, places, ends, visit, rows, ranks, experts, STEPS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """visit[r + 1] = whether row r is a visit; visit[0] = 0."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK) - 1
    _, first, _, kept = _first_row(order, places, ends, row, rows, ranks, experts, STEPS, K, BLOCK)
    tl.store(visit + 1 + row, (kept & (first == row)).to(tl.int32), mask=row < rows)


@triton.jit
def _visits(
    order, places, ends, gates, before, sources, out_places, messages, rows, ranks, experts,
    STEPS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    choice, first, start, kept = _first_row(order, places, ends, row, rows, ranks, experts, STEPS, K, BLOCK)
    visit = tl.load(before + first, mask=kept, other=0)
    number = (visit - tl.load(before + start, mask=kept, other=0)) * K + choice % K
    is_visit = kept & (first == row)
    tl.store(sources + visit, choice // K, mask=is_visit)
    tl.store(out_places + choice, visit, mask=is_visit)
    tl.store(messages + 2 * row, tl.load(gates + row, mask=kept), mask=kept)
    tl.store(messages + 2 * row + 1, number.to(messages.dtype.element_ty), mask=kept)


@triton.jit
def _first_row(
    order, places, ends, row, rows, ranks, experts, STEPS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
):
    """The choice of each row, the first row of its token for the same rank, that rank's first row, and whether it is
    kept."""
    kept = (row >= 0) & (row < tl.load(ends + ranks * experts - 1)) & (row < rows)
    rank = _first_behind(ends, row, kept, ranks, experts, STEPS, BLOCK)
    start = tl.load(ends + rank * experts - 1, mask=kept & (rank > 0), other=0).to(tl.int64)
    choice = tl.load(order + row, mask=kept, other=0)
    first = row
    for k in tl.static_range(K):
        place = tl.load(places + choice // K * K + k, mask=kept, other=-1)
        first = tl.where(place >= start, tl.minimum(first, place), first)
    return choice, first, start, kept


@triton.jit
def _first_behind(ends, place, inside, groups, size, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The first of the groups, each of `size` of the ends, that ends behind each place, by halving."""
    low = tl.zeros([BLOCK], dtype=tl.int32)
    high = tl.zeros([BLOCK], dtype=tl.int32) + groups
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        open = inside & (low < high)
        behind = tl.load(ends + (middle + 1) * size - 1, mask=open, other=0) > place
        high = tl.where(open & behind, middle, high)
        low = tl.where(open & ~behind, middle + 1, low)
    return low


@triton.jit
def _arrived(
    messages, ends, starts, firsts, gates, numbers, places, n, pairs, ranks, k, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    pair = _first_behind(ends, place, inside, pairs, 1, STEPS, BLOCK)  # of expert and rank
    begin = tl.load(ends + pair - 1, mask=inside & (pair > 0), other=0)
    message = tl.load(starts + pair, mask=inside, other=0) + place - begin
    gate = tl.load(messages + 2 * message, mask=inside)
    number = tl.load(messages + 2 * message + 1, mask=inside, other=0).to(tl.int64)
    choice = number + tl.load(firsts + pair % ranks, mask=inside, other=0) * k
    tl.store(gates + place, gate, mask=inside)
    tl.store(numbers + place, choice // k, mask=inside)
    tl.store(numbers + n + place, choice, mask=inside)
    tl.store(numbers + 2 * n + message, place, mask=inside)
    tl.store(places + choice, place, mask=inside)
