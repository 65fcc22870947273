"""Every layout equals one process: losses, gradient norms, each gradient, each parameter after two clipped steps.

Relative error at most 1e-10 in fp64, and copies of a parameter are the same bytes. A layout is one line here.
"""

import pytest

from fivefold.config.rules import check
from tests.parity.cases import Case

STAGES = (0, 1, 2, 3)
METHODS = ("ring", "gather", "ulysses")

DATA = [
    *(Case("llama", dp=2, zero=zero, packed=True) for zero in STAGES),
    Case("bloom-tied", dp=2, zero=3, packed=True),
    *(Case("llama-tied", dp=4, zero=zero, packed=True) for zero in STAGES),
    Case("bloom", dp=4, replicate=2, zero=2, packed=True),
    Case("qwen3", dp=2, zero=3, micro=4),
    Case("narrow", dp=4, zero=3, packed=True),  # 6 rows on 4 ranks are 2, 2, 2 and none; 13 are 4, 4, 4 and 1
    Case("narrow", dp=4, replicate=2, zero=3),
]
TENSOR = [
    *(Case(model, tp=tp, packed=True) for tp in (2, 4) for model in ("llama", "bloom-tied")),
    Case("llama-tied", tp=4, packed=True),
    Case("bloom", tp=2, packed=True),
    Case("qwen3", tp=2, micro=2),
    Case("llama-kv3", tp=3, packed=True),
    Case("bloom-6", tp=2),
    Case("bloom-6", tp=3, packed=True),
    Case("bloom-12", tp=3),
    Case("narrow", tp=2, packed=True),
    Case("llama", tp=4, micro=4),
]
CONTEXT = [
    *(
        Case(model, cp=cp, method=method, packed=True)
        for method in METHODS
        for cp, model in ((2, "llama"), (4, "llama"), (2, "bloom"))
    ),
    Case("llama-tied", cp=2, method="gather", micro=2),
    Case("bloom-6", cp=2, method="ulysses"),
    Case("qwen3", cp=4, method="gather"),
    Case("narrow", cp=4, zero=3),
    *(Case("llama", cp=2, zero=zero, packed=True) for zero in (0, 3)),
]
PAIRS = [
    *(Case("llama", tp=2, cp=2, method=method, packed=True) for method in METHODS),
    Case("bloom-tied", tp=2, cp=2, packed=True),
    Case("narrow", tp=2, cp=2, zero=3),
    *(Case("llama", tp=2, dp=2, zero=zero, packed=True) for zero in STAGES),
    Case("bloom-tied", tp=2, dp=2, zero=3, micro=2),
    Case("narrow", tp=2, dp=2, zero=3, packed=True),
    Case("llama-tied", tp=2, dp=2, replicate=2, packed=True),
    *(Case("llama", cp=2, dp=2, zero=zero, packed=True) for zero in STAGES),
    Case("bloom", cp=2, method="ulysses", dp=2, zero=2, micro=2),
    Case("llama", cp=2, dp=2, replicate=2, zero=1, packed=True),
]
TOGETHER = [
    Case("llama", tp=2, cp=2, dp=2, zero=1, packed=True),
    Case("llama-tied", tp=2, cp=2, method="ulysses", dp=2, zero=3, packed=True),
    Case("bloom", tp=2, cp=2, method="gather", dp=2, replicate=2, zero=2),
    Case("bloom-tied", tp=2, dp=4, replicate=2, zero=3, packed=True),
]
RECOMPUTED = [
    *(Case("llama", recompute=mode, every=every, packed=True) for mode, every in (("selective", 1), ("full", 2))),
    *(Case("llama", tp=2, recompute=mode, packed=True) for mode in ("selective", "full")),
    *(Case("llama", cp=2, recompute=mode, packed=True) for mode in ("selective", "full")),
    *(Case("bloom-tied", dp=2, zero=3, recompute=mode, packed=True) for mode in ("selective", "full")),
    Case("bloom", cp=2, method="ulysses", recompute="full", every=2),
    Case("qwen3", tp=2, cp=2, recompute="selective", every=2, packed=True),
    Case("llama", tp=2, cp=2, dp=2, zero=3, recompute="full", packed=True),
]
OFFLOADED = [
    Case("llama", offload=("activations",), packed=True),
    Case("llama", dp=2, offload=("optimizer",), packed=True),
    Case("bloom", tp=2, recompute="full", offload=("activations",), packed=True),
    Case("llama-tied", tp=2, cp=2, recompute="selective", offload=("activations", "optimizer"), packed=True),
    Case("llama", dp=2, zero=3, offload=("parameters", "optimizer"), packed=True),
]
ACCUMULATED = [  # once and four times a step
    *(Case("llama", micro=micro, packed=True) for micro in (8, 2)),
    *(Case("llama", dp=2, zero=zero, micro=micro, packed=True) for zero in (0, 2) for micro in (4, 1)),
    *(Case("llama", tp=2, micro=micro, packed=True) for micro in (8, 2)),
    *(Case("llama", cp=2, micro=micro, packed=True) for micro in (8, 2)),
    Case("llama-tied", tp=2, cp=2, micro=2, packed=True),
]
LAYOUTS = [*DATA, *TENSOR, *CONTEXT, *PAIRS, *TOGETHER, *RECOMPUTED, *OFFLOADED, *ACCUMULATED]


@pytest.mark.parametrize("case", sorted(LAYOUTS, key=lambda case: case.world), ids=str)
def test_a_layout_equals_one_process(harness, case):
    assert check(case.run, case.world) == []
    assert harness.difference(case) is None


def test_no_layout_stands_here_twice_and_there_are_enough():
    assert len({str(case) for case in LAYOUTS}) == len(LAYOUTS) >= 60


@pytest.mark.parametrize("tp", [2, 4])
def test_three_key_value_heads_are_refused_where_they_cannot_be_cut(tp):
    case = Case("llama-kv3", tp=tp)
    assert any("3 key/value heads" in str(problem) for problem in check(case.run, case.world))
