"""The pieces of every rank computed one after the other by one process: what a GPU's kernels make of them.

No process group is needed, so one GPU checks its kernels, masks and merges over four ranks; on a CPU the same is run to
check the test itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from fivefold.kernels.partial_attention import Gradients, Piece, Running
from fivefold.parallel.axis import Axis
from fivefold.parallel.context import plan_attention, positions
from tests.parallel.context_case import Case, Tensors, by_the_formula, errors, named

RANKS = 4
LONG = ((2048,), (700, 1, 1, 310, 1036), (256,) * 8)  # a rank's chunk has 256 tokens
ODD = ((1600,), (600, 1, 1, 199, 799))  # a chunk of 200, no multiple of a block


def in_turns(case: Case) -> Tensors:
    """Output and gradients of all ranks, without the travelling."""
    q, k, v, dout = (x.transpose(1, 2) for x in case.inputs())
    out, dq, dk, dv = (torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, q, k, v))
    for rank in range(RANKS):
        mine = held(case, rank)
        work = arrivals(case, rank)
        pieces = sum(len(each) for _, each in work)
        running = Running(q[:, :, mine], pieces)
        for keys, some in work:
            running.add(some, q[:, :, mine], k[:, :, keys], v[:, :, keys])
        out[:, :, mine] = running.output.to(out.dtype)
        gradients = Gradients(dout[:, :, mine], q[:, :, mine], running.output.to(q.dtype), running.lse_bhn, pieces)
        for keys, some in work:
            dk_here, dv_here = (torch.zeros_like(x[:, :, keys]) for x in (dk, dv))
            gradients.add(some, k[:, :, keys], v[:, :, keys], dk_here, dv_here)
            dk[:, :, keys] += dk_here
            dv[:, :, keys] += dv_here
        dq[:, :, mine] = gradients.of_queries.to(dq.dtype)
    return named(*(x.transpose(1, 2) for x in (out, dq, dk, dv)))


def arrivals(case: Case, rank: int) -> list[tuple[Tensor, list[Piece]]]:
    """The positions of the keys that a rank gets, one lot after the other, and what it attends to among them."""
    like = torch.empty(0, dtype=case.dtype, device=case.device)
    plan = plan_attention(Axis(RANKS, rank), case.method, case.seq_len, like, case.documents, case.slopes)
    assert isinstance(plan.attention, partial)
    given = plan.attention.keywords
    if case.method == "gather":
        return [(torch.arange(case.seq_len, device=case.device), given["pieces"])]
    return [(held(case, (rank - number) % RANKS), [hop.piece]) for number, hop in enumerate(given["hops"])]


def held(case: Case, rank: int) -> Tensor:
    """The positions of a rank."""
    return positions(case.seq_len, Axis(RANKS, rank), case.method).to(case.device)


def each_kind(test: Callable[..., None]) -> Callable[..., None]:
    """Both methods that work in pieces, each mask."""
    for name, values in (("alibi", [False, True]), ("packed", [False, True]), ("method", ["ring", "gather"])):
        test = pytest.mark.parametrize(name, values)(test)
    return test


@each_kind
def test_all_ranks_in_turn_give_the_whole(method: str, packed: bool, alibi: bool) -> None:
    case = Case(method, packed, alibi)  # type: ignore[arg-type]
    found = errors(in_turns(case), by_the_formula(case))
    assert max(found.values()) <= 1e-10, found


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float32, 3e-3), (torch.float64, 1e-10)], ids=str
)
@pytest.mark.parametrize("lengths", [LONG, ODD], ids=["whole blocks", "parts of blocks"])
@each_kind
def test_all_ranks_in_turn_on_a_gpu(
    method: str,
    packed: bool,
    alibi: bool,
    lengths: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    bound: float,
) -> None:
    """fp32 goes to flex, whose products are TF32 or better."""
    case = Case(method, packed, alibi, 8, 2, 64, lengths, dtype, "cuda")  # type: ignore[arg-type]
    found = errors(in_turns(case), by_the_formula(case))
    assert max(found.values()) <= bound, found
