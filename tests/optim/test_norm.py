"""Sums of squares of gradients: those of the whole model on every rank, in one order, whoever has the parameters."""

from __future__ import annotations

import math

import pytest
import torch

from fivefold.config.run import Optim
from fivefold.optim.offload import optimizer_for
from fivefold.parallel.state import sharded_parameters
from tests.parallel.stages import Layout, fill_gradient, stages_of, whole
from tests.ranks import Crew

LAYOUTS = [
    Layout(),
    Layout(pp=2, folded=True, dp=2),
    Layout(pp=2, tp=2),
    Layout(pp=2, dp=2, replicate=2),
    Layout(pp=4),
    Layout(pp=2),
    Layout(pp=2, chunks=2),
]


def summed_squares(layout: Layout, infinite: str | None) -> tuple[list[str], list[float], dict[str, tuple[int, ...]]]:
    """All names, each gradient's sum of squares, and the shapes of this rank's parameters."""
    stages = stages_of(layout, "fp64")
    parameters = sharded_parameters(stages, layout.mesh)
    optimizer = optimizer_for(parameters, Optim(), (), layout.mesh.pp)
    for name, parameter in parameters.items():
        values = whole(name, tuple(parameter.shape), 0, torch.float64)
        if name == infinite:
            values.view(-1)[-1] = -math.inf
        fill_gradient(parameter, values)
    squares = layout.mesh.sum(optimizer.squares(optimizer.gradients()))
    return optimizer.names, squares.tolist(), {name: tuple(p.shape) for name, p in parameters.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_rank_has_the_sums_of_all_gradients_in_the_order_of_the_names(layout: Layout, ranks: Crew) -> None:
    found = ranks.run(layout.world, summed_squares, layout, None)
    shapes = {name: shape for _, _, mine in found for name, shape in mine.items()}
    for names, squares, _ in found:
        assert sorted(names) == sorted(shapes)
        expected = [whole(name, shapes[name], 0, torch.float64).square().sum().item() for name in names]
        assert squares == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, folded=True)], ids=str)
@pytest.mark.parametrize("infinite", ["embedding.weight", "layers.2.up.weight", "layers.4.down.bias"])
def test_a_gradient_that_is_not_finite_is_named_on_the_ranks_of_other_stages_too(
    layout: Layout, infinite: str, ranks: Crew
) -> None:
    for names, squares, _ in ranks.run(layout.world, summed_squares, layout, infinite):
        assert [name for name, each in zip(names, squares, strict=True) if not math.isfinite(each)] == [infinite]
