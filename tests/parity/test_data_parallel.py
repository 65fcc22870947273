"""Every ZeRO stage equals one process: the loss, the norm, each gradient, and each parameter after three clipped steps.

Relative error at most 1e-10 in fp64: the norm of the difference over max(norm of the reference, 1e-6 of the norm of
all), since some true gradients are zero.
"""

import functools
import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from fivefold.launch.local import worker_environment
from tests.parity.cases import Case
from tests.parity.reference import reference

TOLERANCE = 1e-10
STAGES = (0, 1, 2, 3)
CASES = {
    1: [Case("llama", 1, 2, True)],
    2: [Case(model, zero, 1, True) for model in ("llama", "bloom-tied") for zero in STAGES]
    + [Case("llama-tied", 1, 4, False), Case("qwen3", 3, 2, True)],
    4: [Case(model, zero, 1, True) for model in ("llama-tied", "bloom-tied") for zero in STAGES]
    + [Case("qwen3", 1, 2, False)],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every case of every number of ranks, run by one set of processes a number."""
    found = {}
    for world, cases in CASES.items():
        out = tmp_path_factory.mktemp(f"ranks{world}")
        command = [sys.executable, "-m", "tests.parity.worker", str(out), json.dumps([asdict(case) for case in cases])]
        workers = [
            subprocess.Popen(command, env=worker_environment(rank, world, out / "meeting")) for rank in range(world)
        ]
        assert [worker.wait() for worker in workers] == [0] * world
        found |= {(world, case): torch.load(out / f"{case}.pt") for case in cases}
    return found


expected = functools.cache(reference)


@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world, cases in CASES.items() for case in cases], ids=str
)
def test_a_layout_equals_one_process(results, world, case):
    ours, theirs = results[world, case], expected(case.model, case.packed)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=TOLERANCE)
    for kind in ("gradients", "parameters"):
        assert list(ours[kind]) == list(theirs[kind])
        total = torch.stack([tensor.norm() for tensor in theirs[kind].values()]).norm()
        for name, tensor in theirs[kind].items():
            error = (ours[kind][name] - tensor).norm() / torch.maximum(tensor.norm(), 1e-6 * total)
            assert error <= TOLERANCE, f"{kind} of {name}: relative error {error:.1e}"
