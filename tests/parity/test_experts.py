"""Experts spread over ranks equal one process: each kind of routing, and ep together with every other dimension.

As in `test_layouts.py`; router biases and the loads that routers remember are compared too.
"""

import pytest

from fivefold.config.rules import check
from fivefold.model.reach import goes_by_node
from tests.parity.cases import NEAR, Case

KINDS = (
    "moe",
    "moe-top1",
    "moe-sigmoid",
    "moe-groups",
    "moe-bias",
    "moe-sequence",
    "moe-global",
    "moe-capacity",
)
STAGES = (1, 2, 3)
ROUTED = [
    *(Case(kind, ep=2, dp=2, packed=True, steps=3) for kind in KINDS),
    *(Case(kind, ep=2, tp=2, cp=2, packed=True) for kind in ("moe-sequence", "moe-capacity")),
    Case("moe-capacity", ep=2, cp=2, method="ulysses"),
    Case("moe-sequence", tp=2, micro=4, packed=True),
]
SPREAD = [  # bias routing, one and two replicas of each expert
    *(Case("moe-bias", ep=2, dp=4, zero=zero, packed=True, steps=3) for zero in STAGES),
    *(Case("moe-bias", ep=2, tp=2, dp=2, zero=zero, packed=True, steps=3) for zero in STAGES),
    *(Case("moe-bias", ep=2, cp=2, dp=2, zero=zero, packed=True, steps=3) for zero in STAGES),
    *(Case("moe-bias", ep=2, pp=2, schedule="zb-v", chunks=2, dp=2, zero=zero, steps=3) for zero in STAGES),
    Case("moe-bias", ep=4, dp=4, zero=2, packed=True, steps=3),
    Case("moe-bias", ep=4, tp=2, dp=2, zero=3, packed=True, steps=3),
    Case("moe-bias", ep=4, tp=4, packed=True, steps=3),
    Case("moe-bias", ep=4, tp=2, cp=2, packed=True, steps=3),
    Case("moe-bias", ep=4, cp=4, method="gather", packed=True, steps=3),
    Case("moe-bias", ep=4, tp=2, cp=2, dp=2, zero=1, steps=3),
    Case("moe-bias", ep=4, pp=2, schedule="zb-v", chunks=2, dp=4, zero=3, steps=3),
    *(Case("moe-bias", ep=4, dp=8, zero=zero, steps=3) for zero in (0, 2, 3)),
    Case("moe-bias", ep=2, pp=2, schedule="1f1b", tp=2, dp=2, zero=1, steps=3),
    Case("moe-bias", dp=2, zero=0, micro=1, steps=3),
    Case("moe-bias", dp=2, replicate=2, ep=2, micro=2, steps=3),
]
NODES = [  # tokens go to a node first, then to the rank
    Case("moe-bias", ep=4, near=2, dp=4, zero=3, packed=True, steps=3),
    Case("moe-bias", ep=4, near=2, tp=2, cp=2, packed=True, steps=3),
    Case("moe-full", ep=4, near=2, dp=4, packed=True),
    Case("moe-empty", ep=4, near=2, dp=8, recompute="full", steps=3),
    Case("moe-bias", ep=8, dp=8, steps=3),
    Case("moe-bias", ep=8, near=2, dp=8, zero=2, recompute="full", steps=3),
    Case("moe-bias", ep=8, near=4, tp=2, cp=2, dp=2, packed=True, steps=3),
    Case("moe-bias", ep=4, near=2, pp=2, schedule="zb-v", chunks=2, dp=4, zero=2, steps=3),
]
UNEVEN = [  # 3 experts of a rank on 2 replicas are cut by their width, as are 3 of a width of 3 on 4, one of them empty
    *(Case("moe", ep=2, dp=4, zero=zero) for zero in (1, 3)),
    Case("moe", dp=4, zero=3),
    Case("moe-three", dp=4, zero=3),
]
RECOMPUTED = [
    Case("moe-bias", ep=2, dp=2, recompute="selective", packed=True, steps=3),
    Case("moe-bias", ep=2, dp=4, zero=3, recompute="selective", packed=True, steps=3),
    Case("moe-bias", ep=2, dp=4, zero=3, recompute="full", packed=True, steps=3),
    Case("moe-bias", ep=2, tp=2, dp=2, recompute="full", offload=("activations",), packed=True, steps=3),
    Case("moe-sequence", ep=2, pp=2, schedule="zb-h1", dp=2, recompute="full", steps=3),
]
IDLE = [  # half of the experts, or all but one, get no token
    *(Case(model, ep=2, dp=4, zero=3, recompute="full", steps=3) for model in ("moe-empty", "moe-one")),
    Case("moe-one", ep=4, dp=4),
    Case("moe-empty", ep=4, tp=2, cp=2),
    Case("moe-one", ep=2, pp=2, schedule="zb-v", chunks=2, dp=2),
]
APART = [Case("moe-sigmoid", pp=2, layers=(1, 2), dp=2, zero=3)]  # one pipeline rank has dense layers alone
LAYOUTS = [*ROUTED, *SPREAD, *NODES, *UNEVEN, *RECOMPUTED, *IDLE, *APART]


@pytest.mark.parametrize("case", sorted(LAYOUTS, key=lambda case: case.world), ids=str)
def test_a_layout_equals_one_process(harness, case):
    assert check(case.run, case.world) == []
    assert harness.difference(case) is None


@pytest.mark.parametrize("case", [case for case in NODES if case.near != NEAR], ids=str)
def test_tokens_go_by_nodes_there(case):
    assert goes_by_node(case.run.model.moe, case.ep, case.near)


def test_no_layout_stands_here_twice_and_there_are_enough():
    assert len({str(case) for case in LAYOUTS}) == len(LAYOUTS) >= 40
