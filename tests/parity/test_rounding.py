"""Gradients of a bf16 model over 64 microbatches are as close to fp64 as those of one: they add up in fp32.

Added up in bf16, each microbatch rounds the sum anew, and the error grows to more than twice that of the products.
"""

import dataclasses
import functools

import pytest
import torch

from fivefold.config.run import Precision
from fivefold.data.loader import Microbatch, Step
from tests.parity.cases import SEQ_LEN, Case
from tests.parity.rank import Rank

SEQUENCES = 128


def gradients(case, precision, microbatches):
    """This rank's pieces of the gradient of 128 sequences, which it and the others take in so many microbatches."""
    size = SEQUENCES // case.dp // microbatches
    rank = Rank(dataclasses.replace(case, rows=SEQUENCES, micro=size), precision=precision)
    tokens = torch.randint(0, 1003, (SEQUENCES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    share = tokens.chunk(case.dp)[rank.mesh.dp_rank].chunk(microbatches)
    none = torch.zeros(len(share[0]), SEQ_LEN, dtype=torch.int32)
    batches = [Microbatch(rows[:, :-1], rows[:, 1:], none, packed=False) for rows in share]
    rank.train(Step(batches, SEQUENCES * SEQ_LEN, 0, SEQUENCES))
    return rank.gradients


@pytest.fixture(scope="module")
def error(ranks):
    """`error(case, precision, microbatches)`: relative to fp64, over all matrices."""

    @functools.cache
    def exact():
        return ranks.run(1, gradients, Case("llama-two-layers"), Precision(compute="fp64"), 1)[0]

    def relative(case, precision, microbatches):
        difference, total = 0.0, 0.0
        for found in ranks.run(case.world, gradients, case, precision, microbatches):
            for name, each in found.items():
                expected = exact()[name].values[each.box]
                difference += float(((each.values - expected) ** 2).sum())
                total += float((expected**2).sum())
        return (difference / total) ** 0.5

    return relative


LAYOUTS = [Case("llama-two-layers", dp=dp, zero=zero) for dp in (1, 2) for zero in (0, 1, 2)]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_64_microbatches_are_as_exact_as_one(error, case):
    bf16 = Precision(compute="bf16")
    assert error(case, bf16, 64) < 1.1 * error(case, bf16, 1) < 1e-2


def test_a_sum_in_bf16_would_not_be(error):
    """So that the test above can fail."""
    case = Case("llama-two-layers", dp=2)
    assert error(case, Precision(compute="bf16", reduce="bf16"), 64) > 1.5 * error(case, Precision(compute="bf16"), 1)
