"""What forward keeps for backward falls with tensor and with context parallelism as the ranks are many.

Counted is the distinct memory that autograd saves on a rank, without parameters, in fp64 (no casts): inputs of the
matrix products and of the activation, norms, queries, keys, values, attention's output and its log-sum-exp, the
residual stream. Sizes are such that what does not fall (tokens, the loss's small gradient of the head) is below 1 %.
"""

import pytest
import torch

from fivefold.data.loader import Microbatch
from tests.parity.cases import MODELS, Case
from tests.parity.measure import saved_bytes
from tests.parity.rank import Rank

SEQ_LEN = 512


def kept(case):
    """Bytes that this rank's forward of two sequences keeps."""
    rank = Rank(case)
    tokens = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) % MODELS[case.model].vocab
    batch = Microbatch(tokens, tokens, torch.zeros_like(tokens), packed=False)
    return saved_bytes(rank.model, lambda: rank.model(batch.tokens, batch.labels, batch.documents, batch.packed))


@pytest.fixture(scope="module")
def alone(ranks):
    """Bytes that one process keeps, by model."""
    return {model: ranks.run(1, kept, Case(model))[0] for model in ("wide", "wide-bloom")}


@pytest.mark.parametrize(
    "case",
    [
        *(Case(model, tp=tp) for model in ("wide", "wide-bloom") for tp in (2, 4)),
        *(Case("wide", cp=cp, method=method) for cp in (2, 4) for method in ("ring", "gather")),
        Case("wide", tp=2, cp=2),
    ],
    ids=str,
)
def test_saved_bytes_fall_by_the_number_of_ranks(ranks, alone, case):
    for found in ranks.run(case.world, kept, case):
        assert found == pytest.approx(alone[case.model] / case.world, rel=0.02)


@pytest.mark.parametrize("cp", [2, 4])
def test_ulysses_keeps_attentions_output_twice_and_divides_all_that(ranks, alone, cp):
    """By heads, as attention's backward needs it, and by positions, as the output product's does."""
    wide = MODELS["wide"]
    outputs = wide.layers * 2 * SEQ_LEN * wide.heads * wide.head_size * torch.float64.itemsize
    for found in ranks.run(cp, kept, Case("wide", cp=cp, method="ulysses")):
        assert found == pytest.approx((alone["wide"] + outputs) / cp, rel=0.02)


@pytest.mark.parametrize(("recompute", "most"), [("selective", 0.75), ("full", 0.12)])
def test_recompute_keeps_less_on_top_of_that(ranks, alone, recompute, most):
    for found in ranks.run(2, kept, Case("wide", tp=2, recompute=recompute)):
        assert found < most * alone["wide"] / 2
