"""Validation gives the same value on any layout: each label once, also where ranks get no sequence at all."""

import numpy as np
import pytest

from fivefold.data.loader import validation_batches
from fivefold.data.tokens import TokenSet
from fivefold.data.writer import TokenWriter
from fivefold.train.evaluate import validation_loss
from tests.parity.cases import SEQ_LEN, Case
from tests.parity.pieces import TOLERANCE
from tests.parity.rank import Rank

LAYOUTS = [
    Case("llama", dp=2),
    Case("llama", dp=4, zero=3),
    Case("llama", tp=2),
    Case("llama", cp=2),
    Case("llama", cp=2, method="ulysses"),
    Case("llama", tp=2, cp=2, method="gather"),
    Case("llama", pp=2, micro=2),
    Case("llama", pp=2, schedule="zb-v", chunks=2, micro=2),
    Case("llama", pp=2, schedule="interleaved", chunks=2, micro=2, dp=2, zero=3),
]


@pytest.fixture(
    scope="module", params={"thirteen": (100, 3, 90, 60, 45, 10, 2), "one": (20,)}.items(), ids=lambda p: p[0]
)
def tokens(request, tmp_path_factory):
    """A set of 13 windows of 24 targets in documents of unequal length, and one of a single window."""
    name, lengths = request.param
    folder = tmp_path_factory.mktemp(name)
    writer = TokenWriter(folder, 1003, eod=0)
    writer.write(np.random.default_rng(0).integers(1, 1003, sum(lengths)), np.array(lengths))
    writer.close()
    return folder


def losses(case, folder):
    """The validation loss before and after a step, with two sequences a microbatch."""
    rank = Rank(case)

    def loss():
        place = rank.mesh.dp_rank, rank.mesh.dp
        batches = validation_batches(TokenSet.open(folder), SEQ_LEN, 10_000, 2, *place, document_mask=True)
        return validation_loss(rank.pipeline, batches, rank.mesh)

    before = loss()
    rank.step(0)
    return before, loss()


@pytest.fixture(scope="module")
def alone(ranks, tokens):
    """What one process finds."""
    return ranks.run(1, losses, Case("llama"), str(tokens))[0]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_validation_gives_the_same_value_on_any_layout_and_sees_the_newest_weights(ranks, tokens, alone, case):
    assert alone[0] != alone[1]
    for found in ranks.run(case.world, losses, case, str(tokens)):
        assert found == pytest.approx(alone, rel=TOLERANCE)
