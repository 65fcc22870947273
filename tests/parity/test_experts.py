"""Experts spread over ranks equal one process: each kind of routing, and ep together with every other dimension.

As in `test_layouts.py`; router biases and the loads that routers remember are compared too.
"""

import pytest

from fivefold.config.rules import check
from tests.parity.cases import Case

KINDS = [
    "moe",
    "moe-top1",
    "moe-sigmoid",
    "moe-groups",
    "moe-bias",
    "moe-sequence",
    "moe-global",
    "moe-capacity",
]
LAYOUTS = [
    *(Case(kind, ep=2, dp=2, packed=True) for kind in KINDS),
]


@pytest.mark.parametrize("case", sorted(LAYOUTS, key=lambda case: case.world), ids=str)
def test_a_layout_equals_one_process(harness, case):
    assert check(case.run, case.world) == []
    assert harness.difference(case) is None
