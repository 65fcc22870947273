"""Every schedule equals one process: losses, gradient norms, each gradient, each parameter after two clipped steps.

Relative error at most 1e-10 in fp64. The models have one layer a stage at least: 5 layers, and 9 for eight stages.
"""

import pytest

from fivefold.config.rules import check
from fivefold.config.schedules import SCHEDULES
from tests.parity.cases import Case

CHUNKS = {"interleaved": 2, "zb-v": 2, "dualpipe-v": 2, "auto": 2}
"""Of the schedules that have more than one."""


def of(schedule: str, pp: int, microbatches: int, **more) -> Case:
    """A case of a schedule; 7 sequences are 7 microbatches, 8 are 4 or 8."""
    chunks = CHUNKS.get(schedule, 1)
    model = more.pop("model", "llama-9" if pp * chunks == 8 else "llama")
    rows = 7 if microbatches == 7 else 8
    micro = rows // microbatches // more.get("dp", 1)
    return Case(model, pp=pp, schedule=schedule, chunks=chunks, rows=rows, micro=micro, **more)


SIZES = [
    of(schedule, pp, microbatches, packed=True)
    for pp in (2, 4)
    for schedule, demands in SCHEDULES.items()
    for microbatches in (4, 7, 8)
    if microbatches >= demands.fewest(pp)
]
UNEVEN = {1: (1, 4), 2: (1, 2, 1, 1)}
COMBINED = [
    case
    for schedule in SCHEDULES
    for case in (
        *(of(schedule, 2, 4, dp=2, zero=zero) for zero in (2, 3)),
        of(schedule, 2, 4, tp=2, packed=True),
        of(schedule, 2, 4, cp=2, packed=True),
        of(schedule, 2, 4, recompute="selective", packed=True),
        of(schedule, 2, 4, recompute="full"),
        of(schedule, 2, 4, model="llama-tied"),
        of(schedule, 2, 4, layers=UNEVEN[CHUNKS.get(schedule, 1)]),
    )
]
TOGETHER = [
    of("zb-v", 2, 4, model="bloom-tied", dp=2, zero=3, recompute="selective", packed=True),
    of("zb-v", 2, 4, tp=2, cp=2, zero=3, recompute="full", packed=True),
    of("zb-h1", 2, 4, model="llama-tied", tp=2, dp=2, zero=3, packed=True),
    of("1f1b", 4, 4, model="llama-tied", dp=2, zero=1),
    of("dualpipe-v", 2, 4, model="llama-tied", tp=2, cp=2, offload=("activations",)),
    of("zb-h2", 2, 4, model="bloom", dp=2, replicate=2, zero=2, offload=("optimizer",)),
    of("auto", 2, 4, model="qwen3", dp=2, zero=0),
]
LAYOUTS = [*SIZES, *COMBINED, *TOGETHER]


@pytest.mark.parametrize("case", sorted(LAYOUTS, key=lambda case: case.world), ids=str)
def test_a_schedule_equals_one_process(harness, case):
    assert check(case.run, case.world) == []
    assert harness.difference(case) is None


def test_no_layout_stands_here_twice():
    assert len({str(case) for case in LAYOUTS}) == len(LAYOUTS)
