"""A gradient that is infinite, undefined or zero on one rank alone: all ranks do the same with the step.

One rank skipping what the others take is the silent form of this fault; it is looked for on every axis.
"""

import math

import pytest

from tests.parity.cases import Case
from tests.parity.pieces import piece
from tests.parity.rank import Rank

CUT, WHOLE = "layers.3.ffn.down.weight", "layers.2.ffn_norm.weight"
LAYOUTS = [
    Case("llama", dp=2),
    Case("llama", tp=2),
    Case("llama", cp=2),
    Case("llama", tp=2, dp=2, zero=3),
    Case("llama", tp=2, cp=2),
    Case("llama", pp=2, layers=(2, 3), micro=2),
    Case("llama-tied", pp=2, schedule="zb-v", chunks=2, layers=(1, 2, 1, 1), micro=2),
]

EXPERTS = [
    Case("moe-bias", ep=2, dp=2, zero=3, packed=True),
    Case("moe-bias", ep=2, tp=2, packed=True),
]


def state_of(rank):
    """The bytes of this rank's pieces of all that a step changes."""
    parameters = {name: found.values.tobytes() for name, found in rank.parameters().items()}
    return parameters | {name: piece(value).values.tobytes() for name, value in rank.optimizer.state().items()}


def step_with(case, change):
    """The second step, in which `change(rank, name, gradient)` is done to each gradient of this rank's own."""
    rank = Rank(case)
    rank.step(0)
    before = state_of(rank)
    found = rank.optimizer.gradients

    def changed():
        gradients = found()
        for name, gradient in zip(rank.state, gradients, strict=True):
            change(rank.mesh, name, gradient)
        return gradients

    rank.optimizer.gradients = changed
    result = rank.step(1)
    after = state_of(rank)
    squares = dict(zip(rank.optimizer.names, result.squares.tolist(), strict=True))
    return {
        "norm": result.norm.item(),
        "changed": [name for name in before if before[name] != after[name]],
        "not finite": [name for name, square in squares.items() if not math.isfinite(square)],
        "finite": all(math.isfinite(values.values.sum()) for values in rank.parameters().values()),
    }


def step_with_one(case, value, parameter):
    """A step in which the last rank's piece of one gradient has one element `value`."""

    def change(mesh, name, gradient):
        if name == parameter and mesh.rank == mesh.world - 1:
            gradient.view(-1)[0] = value

    return step_with(case, change)


def step_with_zeros(case):
    """A step in which all gradients are zero."""
    return step_with(case, lambda mesh, name, gradient: gradient.zero_())


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
@pytest.mark.parametrize(("value", "parameter"), [(math.inf, CUT), (-math.inf, WHOLE), (math.nan, WHOLE)])
def test_one_bad_element_on_one_rank_changes_nothing_on_any_and_is_named(ranks, case, value, parameter):
    for result in ranks.run(case.world, step_with_one, case, value, parameter):
        assert not math.isfinite(result["norm"])
        assert result["changed"] == []
        assert result["not finite"] == [parameter]


@pytest.mark.parametrize("case", EXPERTS, ids=str)
@pytest.mark.parametrize("parameter", ["layers.3.ffn.experts.down", "layers.2.ffn.router.weight"])
def test_one_bad_element_of_experts_or_a_router_changes_no_bias_and_no_load_either(ranks, case, parameter):
    for result in ranks.run(case.world, step_with_one, case, math.inf, parameter):
        assert result["changed"] == []
        assert result["not finite"] == [parameter]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_gradients_of_zero_have_the_norm_zero_and_make_nothing_undefined(ranks, case):
    for result in ranks.run(case.world, step_with_zeros, case):
        assert result["norm"] == 0.0
        assert result["finite"]
        assert result["not finite"] == []
