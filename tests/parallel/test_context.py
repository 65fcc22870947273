"""Attention over the ranks of cp against the formula in one process: each method, mask and number of heads."""

from __future__ import annotations

import pytest
import torch

from fivefold.parallel.axis import ALONE, Axis
from fivefold.parallel.context import Method, positions
from tests.parallel.context_case import Case, by_the_formula, errors, joined, on_a_rank, saved_bytes
from tests.parallel.context_faults import faulty
from tests.ranks import Crew

METHODS: tuple[Method, ...] = ("ring", "gather", "ulysses")


def legal(world: int) -> list[tuple[Method, int]]:
    """Methods and key/value heads of 12: for ulysses they divide by cp."""
    return [(method, n) for method in METHODS for n in (1, 2, 3, 4, 12) if method != "ulysses" or n % world == 0]


LEGAL = [(world, *chosen) for world in (2, 4) for chosen in legal(world)]


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("world", "method", "kv_heads"), LEGAL)
def test_output_and_gradients_are_those_of_one_process(
    world: int, method: Method, kv_heads: int, packed: bool, alibi: bool, ranks: Crew
) -> None:
    case = Case(method, packed, alibi, kv_heads=kv_heads)
    found = errors(joined(ranks.run(world, on_a_rank, case)), by_the_formula(case))
    assert max(found.values()) <= 1e-10, found


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_other_formats_are_close_to_float64(
    method: Method, packed: bool, dtype: torch.dtype, bound: float, ranks: Crew
) -> None:
    case = Case(method, packed, alibi=packed, dtype=dtype)
    got = joined(ranks.run(2, on_a_rank, case))
    assert {tensor.dtype for tensor in got.values()} == {dtype}
    found = errors(got, by_the_formula(case))
    assert max(found.values()) <= bound, found


@pytest.mark.parametrize("method", METHODS)
def test_recompute_in_backward_gives_the_same(method: Method, ranks: Crew) -> None:
    case = Case(method, packed=True)
    kept, again = (joined(ranks.run(2, on_a_rank, case, recompute)) for recompute in (False, True))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_kept_for_backward_falls_by_cp(method: Method, dtype: torch.dtype, ranks: Crew) -> None:
    case = Case(method, dtype=dtype, head_size=16)
    alone = saved_bytes(case)
    assert ranks.run(2, saved_bytes, case) == pytest.approx([alone / 2] * 2, rel=0.02)


def test_a_rank_holds_an_early_and_a_late_chunk_so_that_all_have_the_same_work() -> None:
    held = [positions(16, Axis(4, rank), "ring") for rank in range(4)]
    assert [mine.tolist() for mine in held] == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    assert len({int(mine.sum()) for mine in held}) == 1  # a token sees as many as its position says
    assert torch.equal(positions(16, Axis(4, 2), "gather"), held[2])
    assert positions(16, Axis(4, 2), "ulysses").tolist() == [8, 9, 10, 11]
    assert all(torch.equal(positions(7, ALONE, method), torch.arange(7)) for method in METHODS)


@pytest.mark.parametrize(("method", "seq_len"), [("ring", 20), ("gather", 20), ("ulysses", 18)])
def test_a_length_that_cannot_be_cut_evenly_loses_no_token_in_silence(method: Method, seq_len: int) -> None:
    with pytest.raises(ValueError, match=f"{seq_len} positions cannot be cut into"):
        positions(seq_len, Axis(4, 0), method)


@pytest.mark.parametrize(
    ("fault", "method", "wrong"),
    [
        ("merges_drop_the_log_sum_exp", "ring", {"out", "dq", "dk", "dv"}),
        ("merges_drop_the_log_sum_exp", "gather", {"out", "dq", "dk", "dv"}),
        ("one_hop_loses_its_gradients", "ring", {"dk", "dv"}),
        ("slopes_are_those_of_rank_0", "ulysses", {"out", "dq", "dk", "dv"}),
    ],
)
def test_the_comparison_sees_a_fault(fault: str, method: Method, wrong: set[str], ranks: Crew) -> None:
    case = Case(method, alibi=method == "ulysses")
    found = errors(joined(ranks.run(2, faulty, case, fault)), by_the_formula(case))
    assert {name for name, error in found.items() if error > 1e-3} == wrong
    assert all(error < 1e-10 for name, error in found.items() if name not in wrong)
