"""What forward keeps for backward falls with tensor and with context parallelism as the ranks are many.

Counted is the distinct memory that autograd saves on a rank, without parameters, in fp64 (no casts): inputs of the
matrix products and of the activation, norms, queries, keys, values, attention's output and its log-sum-exp, the
residual stream. Sizes are such that what does not fall (tokens, the loss's small gradient of the head) is below 1 %.
"""

import pytest
import torch

from fivefold.data.loader import Microbatch
from tests.memory import bytes_left
from tests.parity.cases import MODELS, Case
from tests.parity.measure import saved_bytes
from tests.parity.rank import Rank

SEQ_LEN = 512
METHODS = ("ring", "gather", "ulysses")


def kept(case):
    """Bytes that this rank's forward of two sequences has autograd keep."""
    rank = Rank(case)
    return saved_bytes(rank.model, lambda: loss_of(rank))


def left(case):
    """Bytes that this rank's forward leaves allocated, by whatever means they are kept."""
    rank = Rank(case)
    with torch.no_grad():
        loss_of(rank)  # the gathered weights are there from now on
    return bytes_left(lambda: loss_of(rank))[0]


def loss_of(rank):
    tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) % MODELS[rank.case.model].vocab
    batch = Microbatch(tokens, tokens, torch.zeros_like(tokens), packed=False)
    return rank.model(batch.tokens, batch.labels, batch.documents, batch.packed)


@pytest.fixture(scope="module")
def alone(ranks):
    """Bytes that one process keeps, by model."""
    return {model: ranks.run(1, kept, Case(model))[0] for model in ("wide", "wide-bloom")}


@pytest.mark.parametrize(
    "case",
    [
        *(Case(model, tp=tp) for model in ("wide", "wide-bloom") for tp in (2, 4)),
        *(Case("wide", cp=cp, method=method) for cp in (2, 4) for method in METHODS),
        Case("wide", tp=2, cp=2),
    ],
    ids=str,
)
def test_saved_bytes_fall_by_the_number_of_ranks(ranks, alone, case):
    for found in ranks.run(case.world, kept, case):
        assert found == pytest.approx(alone[case.model] / case.world, rel=0.02)


@pytest.mark.parametrize(("recompute", "most"), [("selective", 0.6), ("full", 0.15)])
def test_recompute_keeps_less(ranks, recompute, most):
    """On one rank: with several, gloo's threads free what they sent, and nobody records that."""
    (everything,) = ranks.run(1, left, Case("wide"))
    (found,) = ranks.run(1, left, Case("wide", recompute=recompute))
    assert found < most * everything
