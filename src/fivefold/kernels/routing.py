"""Which experts each token chooses, and with what weight.

The choice is made from scores that may have a bias and be limited to some groups of experts; the gates are the chosen
experts' scores without either. Sources: Shazeer et al. 2017 (top-k), Fedus et al. 2021 (Switch, the balance loss), Zoph
et al. 2022 (z-loss), DeepSeek-AI 2024 (sigmoid scores, groups, bias).
"""

# t tokens  k choices of a token  e experts  g groups  b sequences

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.config.run import Experts

EPSILON = 1e-20
"""Added to the sum that gates are divided by, as transformers does."""


class Choice(NamedTuple):
    """What a router decides."""

    experts_tk: Tensor
    """Numbers of the chosen experts, int64, the best first."""
    gates_tk: Tensor
    probabilities_te: Tensor
    """The scores of each token, divided by their sum."""


def choose(logits_te: Tensor, bias_e: Tensor | None, moe: Experts) -> Choice:
    """The choices of each token by the router's logits, in at least fp32. The bias has no gradient."""
    if moe.scores == "softmax":
        scores_te = probabilities_te = logits_te.softmax(dim=-1)
    else:
        scores_te = logits_te.sigmoid()
        probabilities_te = scores_te / (scores_te.sum(dim=-1, keepdim=True) + EPSILON)
    with torch.no_grad():
        ranked_te = scores_te if bias_e is None else scores_te + bias_e
        if moe.groups > 1:
            ranked_te = _in_best_groups(ranked_te, moe.groups, moe.top_groups)
        experts_tk = ranked_te.topk(moe.top_k, dim=-1).indices
    gates_tk = scores_te.gather(-1, experts_tk)
    if moe.normalize:
        gates_tk = gates_tk / (gates_tk.sum(dim=-1, keepdim=True) + EPSILON)
    return Choice(experts_tk, gates_tk * moe.scale, probabilities_te)


def _in_best_groups(scores_te: Tensor, groups: int, top_groups: int) -> Tensor:
    """The scores, with those outside of each token's best groups at -inf: a group is as good as its two best experts.

    Not at 0, which would be better than a negative score inside.
    """
    scores_tge = scores_te.unflatten(-1, (groups, -1))
    of_group_tg = scores_tge.topk(2, dim=-1).values.sum(dim=-1)
    best_tg = of_group_tg.topk(top_groups, dim=-1).indices
    outside_tg = torch.ones_like(of_group_tg, dtype=torch.bool).scatter_(-1, best_tg, False)
    return scores_tge.masked_fill(outside_tg[..., None], -torch.inf).flatten(-2)


class Sorted(NamedTuple):
    """Choices in the order of their experts, dropped ones last; those of one expert in the order of the tokens."""

    order_r: Tensor
    """Number of each row's choice among all t x k."""
    places_tk: Tensor
    """The row of each choice, -1 for one that was dropped."""
    ends_e: Tensor
    """Where each expert's rows end, int32."""


def sort_by_expert(experts_tk: Tensor, experts: int) -> Sorted:
    """The choices of `experts_tk` as rows."""
    narrow = torch.int16 if experts <= torch.iinfo(torch.int16).max else torch.int64  # sorted in half the time
    sorted_r, order_r = experts_tk.flatten().to(narrow).sort(stable=True)
    numbers_e = torch.arange(experts, dtype=narrow, device=sorted_r.device)
    ends_e = torch.searchsorted(sorted_r, numbers_e, right=True, out_int32=True)
    return Sorted(order_r, inverse(order_r).view_as(experts_tk), ends_e)


def inverse(order_r: Tensor) -> Tensor:
    """Of an order, the place of each number."""
    return torch.empty_like(order_r).scatter_(0, order_r, torch.arange(len(order_r), device=order_r.device))


def counts_of(ends_e: Tensor) -> Tensor:
    """How many rows end at each of the ends, after the one before."""
    return ends_e.diff(prepend=ends_e.new_zeros(1))


def without_dropped(choices: Sorted, kept_tk: Tensor) -> Sorted:
    """The same with dropped choices behind the last expert's rows, where nothing reads them.

    They are not left out, since how many they are is known on the device alone.
    """
    kept_r = kept_tk.flatten()[choices.order_r]
    end_r, dropped_end_r = kept_r.cumsum(0), (~kept_r).cumsum(0)
    place_r = torch.where(kept_r, end_r, end_r[-1:] + dropped_end_r) - 1
    order_r = torch.empty_like(choices.order_r).scatter_(0, place_r, choices.order_r)
    places_tk = place_r[choices.places_tk].masked_fill(~kept_tk, -1)
    ends = torch.cat([end_r.new_zeros(1), end_r])[choices.ends_e]
    return Sorted(order_r, places_tk, ends.to(choices.ends_e.dtype))


def capacity(factor: float, length: int, moe: Experts) -> int:
    """How many choices an expert takes of a sequence of `length` tokens: `factor` times its even share, rounded up.

    At most `length`, however large the factor is: no expert has more than one choice of a token.
    """
    return ceil(min(length, factor * length * moe.top_k / moe.experts))


def within_capacity(experts_bSk: Tensor, experts: int, capacity: int) -> Tensor:
    """Of all choices of whole sequences (b, S, k), those that come while their expert still takes some, as (b, S, k).

    In each sequence an expert takes its first `capacity` choices, in the order of the tokens.
    """
    row_b = torch.arange(len(experts_bSk), device=experts_bSk.device)
    places = (experts_bSk + experts * row_b[:, None, None]).flatten()
    sorted_places, order = places.sort(stable=True)
    first = torch.searchsorted(sorted_places, sorted_places)
    before = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device) - first)
    return (before < capacity).view_as(experts_bSk)
