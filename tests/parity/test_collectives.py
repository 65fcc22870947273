"""How often the ranks talk to each other: a layer's collectives with tensor parallelism, a step's with ZeRO.

What belongs to one layer is the difference between models of two layers and of one; embedding, head, norms and the
step's own sums fall out of it.
"""

import dataclasses
from collections import Counter

import pytest

from tests.parity.cases import MODELS, Case, share_of
from tests.parity.measure import counted
from tests.parity.rank import Rank

SHORT = ("llama-layer", "llama-two-layers")


def forward_and_backward(case):
    """The collectives of one microbatch's forward and of its backward."""
    rank = Rank(case)
    (batch, *_) = share_of(case, 0, rank.mesh.dp_rank).microbatches
    rank.pipeline.accumulations[0].expect(last=True)
    with counted() as forward:
        loss = rank.model(batch.tokens, batch.labels, batch.documents, batch.packed)
    with counted() as backward:
        loss.backward()
    return forward, backward


def whole_step(case):
    """The collectives of a step, the second one, when nothing is set up any more."""
    rank = Rank(case)
    rank.step(0)
    with counted() as counts:
        rank.step(1)
    return counts


def of_a_layer(ranks, case):
    """Forward's and backward's collectives of one layer, the same on every rank."""
    short, long = (ranks.run(case.world, forward_and_backward, dataclasses.replace(case, model=m)) for m in SHORT)
    by_rank = [tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(short, long, strict=True)]
    assert by_rank == by_rank[:1] * case.world
    return by_rank[0]


FORWARD = Counter({"all-gather": 2, "reduce-scatter": 2})
BACKWARD = Counter({"all-gather": 4, "reduce-scatter": 2})


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("recompute", "backward"),
    [("none", BACKWARD), ("selective", BACKWARD), ("full", BACKWARD + FORWARD)],
)
def test_a_layer_gathers_and_reduces_twice_forward_and_gathers_four_times_backward(ranks, tp, recompute, backward):
    assert of_a_layer(ranks, Case(SHORT[0], tp=tp, recompute=recompute)) == (FORWARD, backward)


def test_a_step_sums_partial_gradients_over_tp_once_and_what_it_reports_once(ranks):
    counts = ranks.run(2, whole_step, Case("llama", tp=2, micro=8))
    inside = ranks.run(2, forward_and_backward, Case("llama", tp=2, micro=8))
    for step, (forward, backward) in zip(counts, inside, strict=True):
        assert step - forward - backward == Counter({"all-reduce": 2})


UNITS = MODELS["llama"].layers + 3
"""What ZeRO gathers and reduces as one: each layer, embedding, head, and the last norm."""


@pytest.mark.parametrize(
    ("zero", "gathers", "reductions"),
    [(1, UNITS, UNITS), (2, UNITS, 4 * UNITS), (3, 4 * 2 * UNITS, 4 * UNITS)],
)
def test_zero_1_gathers_and_reduces_each_unit_once_a_step_of_four_microbatches(ranks, zero, gathers, reductions):
    counts = ranks.run(2, whole_step, Case("llama", dp=2, zero=zero, micro=1))
    assert counts == [Counter({"all-gather": gathers, "reduce-scatter": reductions, "all-reduce": 1})] * 2


def test_replicas_add_up_their_shards_once_a_step_however_often_the_shards_are_reduced(ranks):
    case = Case("llama", dp=4, replicate=2, zero=2, micro=1)
    expected = Counter({"all-gather": UNITS, "reduce-scatter": 2 * UNITS, "all-reduce": UNITS + 1})
    assert ranks.run(4, whole_step, case) == [expected] * 4


UNIT_FORWARD, UNIT_BACKWARD = Counter({"all-gather": 1}), Counter({"reduce-scatter": 1})
"""A layer's weights are sharded over cp too."""


@pytest.mark.parametrize(
    ("method", "forward", "backward"),
    [
        ("ring", {"exchange": 1}, {"exchange": 2}),  # keys and values; again, and their gradients straight home
        ("gather", {"all-gather": 1}, {"all-gather": 1, "reduce-scatter": 1}),
        ("ulysses", {"all-to-all": 2}, {"all-to-all": 2}),
    ],
)
def test_context_parallelism_talks_in_attention_alone(ranks, method, forward, backward):
    found = of_a_layer(ranks, Case(SHORT[0], cp=2, method=method))
    assert found == (UNIT_FORWARD + Counter(forward), UNIT_BACKWARD + Counter(backward))
