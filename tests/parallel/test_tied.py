"""A tied embedding over stages is one weight: one gradient, the sum of both, and the same bytes on both stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fivefold.parallel.axis import ALONE
from fivefold.parallel.state import TIED_COPY, ShardedParameter, _sharded, names_of_all, sharded_parameters
from fivefold.parallel.tied import tied_embedding
from tests.parallel.stages import (
    LAYERS,
    VOCABULARY,
    WIDTH,
    Box,
    Layout,
    Stage,
    box_of,
    fill,
    fill_gradient,
    stages_of,
    whole,
)
from tests.ranks import Crew, kept

OWNER, SHAPE = "embedding.weight", (VOCABULARY, WIDTH)
LAYOUTS = [
    Layout(pp=1, chunks=2),
    Layout(pp=2),
    Layout(pp=2, folded=True),
    Layout(pp=2, chunks=2, dp=2),
    Layout(pp=2, dp=2, zero=3),
    Layout(pp=2, dp=2, zero=0),
    Layout(pp=2, folded=True, dp=2, zero=3),
    Layout(pp=2, tp=2),
    Layout(pp=4),
    Layout(pp=4, folded=True),
]


def tied_parameters(layout: Layout, stages: dict[int, Any]) -> dict[str, ShardedParameter]:
    """This rank's side of the tied weight, or its sides, as if the copy were a parameter too."""
    last = len(layout.placement) - 1
    found = {"owner": sharded_parameters(stages, layout.mesh)[OWNER]} if 0 in stages else {}
    if last in stages:
        head = stages[last].head
        found["copy"] = _sharded(head.weight, last, head, "weight", layout.mesh)
    return found


Seen = dict[str, tuple[Box, torch.Tensor]]


def two_steps(layout: Layout, compute: str, offload: bool) -> Seen:
    """Weights are shared, gradients added, the owner updated, weights shared: twice, and what each side then has."""
    stages = stages_of(layout, compute, offload)
    tied = tied_embedding(stages, layout.placement, layout.mesh)
    sides = tied_parameters(layout, stages)
    seen: Seen = {}
    assert (tied is None) == (not sides)
    for step in range(2):
        for side, each in sides.items():
            fill(each, whole(side, SHAPE, step, each.local.dtype))
        if tied is not None:
            tied.share()
        for side, each in sides.items():
            seen[f"{side}'s weight {step}"] = box_of(each.whole), each.local.clone()
            fill_gradient(each, whole(f"{side}'s gradient", SHAPE, step, each.local.dtype))
        if tied is not None:
            tied.add_gradients()
        if "owner" in sides:
            owner = sides["owner"]
            seen[f"gradient {step}"] = box_of(owner.whole), owner.parameter.grad.to_local().clone()
        if "copy" in sides:
            assert sides["copy"].parameter.grad is None, "nobody else takes it"
    return seen


def expected(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {}
    for step in range(2):
        found |= {f"{side}'s weight {step}": whole("owner", SHAPE, step, dtype) for side in ("owner", "copy")}
        parts = [whole(f"{side}'s gradient", SHAPE, step, dtype) for side in ("owner", "copy")]
        found[f"gradient {step}"] = (parts[0].double() + parts[1].double()).to(dtype)  # rounded once
    return found


@pytest.mark.parametrize(("compute", "dtype"), [("fp64", torch.float64), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_of_both_are_added_once_and_the_copy_follows_the_owner(
    layout: Layout, compute: str, dtype: torch.dtype, ranks: Crew
) -> None:
    seen = ranks.run(layout.world, two_steps, layout, compute, False)
    assert_exactly(seen, expected(dtype))


@pytest.mark.parametrize("layout", [LAYOUTS[3], LAYOUTS[6]], ids=str)
def test_pieces_may_be_in_cpu_memory(layout: Layout, ranks: Crew) -> None:
    assert_exactly(ranks.run(layout.world, two_steps, layout, "fp32", True), expected(torch.float32))


def assert_exactly(seen: list[Seen], wanted: dict[str, torch.Tensor]) -> None:
    """The pieces of all ranks are those of the whole tensors, bit for bit, and cover them."""
    for name, tensor in wanted.items():
        covered = torch.zeros(SHAPE, dtype=torch.bool)
        for box, values in (rank[name] for rank in seen if name in rank):
            covered[box] = True
            assert values.dtype == tensor.dtype
            assert torch.equal(values, tensor[box]), name
        assert covered.all(), f"{name} is not on the ranks"


def names_and_marks(layout: Layout) -> tuple[list[str], list[str]]:
    stages = stages_of(layout)
    held = [name for stage in stages.values() for name, _ in stage.named_parameters()]
    return held, names_of_all(sharded_parameters(stages, layout.mesh), layout.mesh.pp)


@pytest.mark.parametrize("layout", [LAYOUTS[9], Layout(pp=2, chunks=2, dp=2), LAYOUTS[1], LAYOUTS[2]], ids=str)
def test_the_copy_is_no_parameter_and_all_ranks_name_all_others_in_the_order_of_the_stages(
    layout: Layout, ranks: Crew
) -> None:
    alone = [name for name, _ in Stage(range(LAYERS), first=True, last=True, tp=ALONE).named_parameters()]
    found = ranks.run(layout.world, names_and_marks, layout)
    assert sum("head.weight" in held for held, _ in found) == layout.dp, "the last stage holds a copy"
    assert all(names == alone for _, names in found)
    assert "head.weight" not in alone
    assert len(alone) == len(set(alone)) == 1 + 4 * 5 + 2


def untied() -> bool:
    layout = Layout(pp=2)
    stages = stages_of(layout)
    if 1 in stages:
        delattr(stages[1].head, TIED_COPY)
    return tied_embedding(stages, layout.placement, layout.mesh) is None


def test_a_head_of_its_own_is_a_parameter_and_shares_nothing(ranks: Crew) -> None:
    assert ranks.run(2, untied) == [True, True]
    assert kept == {}, "the test's own process has no group"
