"""Multi-token prediction on every layout equals one process: its gradient reaches the embedding through a copy of it,
the head is used several times, and positions look ahead over the ranks of cp and the ends of documents."""

import pytest

from fivefold.config.rules import check
from tests.parity.cases import MODELS, Case, share_of
from tests.parity.rank import Rank

DEEP = Case("mtp-2-tied", pp=4, cp=2, method="gather", micro=2, packed=True)
SPREAD = Case("mtp-moe", dp=2, ep=2, zero=3, recompute="selective", packed=True)
LAYOUTS = [
    DEEP,
    SPREAD,
    Case("mtp-2", dp=2, zero=1, packed=True),
    Case("mtp-2", dp=2, zero=3, micro=2, packed=True),
    Case("mtp-2-tied", dp=2, zero=3, recompute="selective"),
    Case("mtp-2", tp=2, packed=True),
    Case("mtp-2", cp=2, packed=True),
    Case("mtp-2", cp=2, method="ulysses", packed=True),
    Case("mtp", pp=2, micro=2, packed=True),
    Case("mtp-2-tied", pp=2, micro=2, packed=True),
    Case("mtp", pp=2, schedule="zb-v", chunks=2, micro=2, packed=True),
    Case("mtp-2-tied", pp=2, schedule="zb-v", chunks=2, micro=2, recompute="full"),
    Case("mtp-bloom", tp=2, recompute="full", packed=True),
    Case("mtp-2-tied", tp=2, cp=2, zero=3, recompute="full", packed=True),
    Case("mtp", pp=2, schedule="zb-h1", tp=2, micro=2, packed=True),
    Case("mtp-2-tied", pp=2, schedule="dualpipe-v", chunks=2, tp=2, micro=2),
    Case("mtp", pp=2, schedule="interleaved", chunks=2, dp=2, zero=3, micro=1, recompute="selective", packed=True),
    Case("mtp-2", pp=2, micro=2, offload=("optimizer", "parameters", "activations"), packed=True),
    Case("mtp-moe", pp=2, schedule="zb-v", chunks=2, cp=2, ep=2, micro=2, recompute="full", packed=True),
]


@pytest.mark.parametrize("case", sorted(LAYOUTS, key=lambda case: case.world), ids=str)
def test_a_layout_equals_one_process(harness, case):
    assert check(case.run, case.world) == []
    assert harness.difference(case) is None


CAUGHT = [
    (Case("mtp-2", dp=2, fault="further-labels-of-own-share"), "gradient of embedding.weight"),
    (Case("mtp-2", cp=2, fault="looking-ahead-in-own-slice"), "gradient of embedding.weight"),
    (Case("mtp", pp=2, micro=2, fault="head-without-factor"), "gradient of head.weight"),
    (Case("mtp", pp=2, micro=2, fault="copy-of-the-embedding-not-added"), "gradient of embedding.weight"),
    (Case("mtp", pp=2, micro=2, fault="copy-of-the-embedding-never-renewed"), "norms on rank 0"),
]


@pytest.mark.parametrize(("case", "says"), CAUGHT, ids=str)
def test_a_fault_made_on_purpose_is_noticed_and_named(harness, case, says):
    difference = harness.difference(case)
    assert difference is not None
    assert difference.startswith(says)


def validated_and_trained(case):
    """Of two steps: the validation loss on the step's batch, before it; the step's loss, and the mean of each depth."""
    rank = Rank(case)
    seen = []
    for number in range(2):
        share = share_of(case, number, rank.mesh.dp_rank)
        validated = rank.mesh.sum(rank.pipeline.evaluate(share.microbatches)[None] / share.labels)
        result = rank.train(share)
        seen.append([*validated.tolist(), result.loss.item(), *result.totals.mtp_losses.tolist()])
    return seen


@pytest.mark.parametrize("case", [DEEP, SPREAD], ids=str)
def test_every_rank_reports_the_mean_loss_of_each_depth_and_validation_that_of_the_next_token(ranks, case):
    (alone,) = ranks.run(1, validated_and_trained, Case(case.model, packed=case.packed))
    for found in ranks.run(case.world, validated_and_trained, case):
        for seen, expected in zip(found, alone, strict=True):
            assert seen == pytest.approx(expected, rel=1e-10)
            assert seen[0] == pytest.approx(seen[1], rel=1e-10)
            assert len(seen) == 2 + MODELS[case.model].mtp
