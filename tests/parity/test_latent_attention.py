"""Latent attention on every layout equals one process: its short vectors are made by whole weights on each rank of tp,
whose gradients are partial sums, deferred ones too."""

import pytest

from tests.parity.cases import Case
from tests.parity.test_activations import kept

METHODS = ("ring", "gather", "ulysses")
LAYOUTS = [
    *(Case("mla", cp=2, method=method, packed=method != "gather") for method in METHODS),
    Case("mla", dp=2, zero=3, recompute="selective", packed=True),
    Case("mla", recompute="full"),
    Case("mla", pp=2, schedule="1f1b"),
    Case("mla", tp=2),
    Case("mla", tp=2, recompute="selective"),
    Case("mla-no-q-rank", tp=2, packed=True),
    Case("mla-no-q-rank", cp=2, recompute="full"),
    Case("mla", tp=4, packed=True),
    Case("mla", tp=2, cp=2),
    Case("mla", tp=2, cp=2, method="ulysses", recompute="selective"),
    Case("mla-4", pp=2, schedule="zb-v", chunks=2, tp=2),
    Case("mla-4", pp=2, schedule="zb-v", chunks=2, dp=2, zero=3, recompute="selective"),
    Case("mla", tp=2, dp=2, zero=2, offload=("activations",)),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_a_layout_of_latent_attention_equals_one_process(harness, case):
    assert harness.difference(case) is None


@pytest.fixture(scope="module")
def alone(ranks):
    """Bytes that one process keeps for backward."""
    return ranks.run(1, kept, Case("wide-mla"))[0]


@pytest.mark.parametrize("split", [{"tp": 2}, {"tp": 4}, {"cp": 2, "method": "ring"}, {"tp": 2, "cp": 2}], ids=str)
def test_what_is_kept_falls_by_the_number_of_ranks(ranks, alone, split):
    case = Case("wide-mla", **split)
    for found in ranks.run(case.world, kept, case):
        assert found == pytest.approx(alone / case.world, rel=0.02)
