"""Every ZeRO stage equals one process: the loss, the norm, each gradient, and each parameter after three clipped steps.

Relative error at most 1e-10 in fp64: the norm of the difference over max(norm of the reference, 1e-6 of the norm of
all), since some true gradients are zero.
"""

import functools
import math

import numpy as np
import pytest
import torch

from fivefold.config.run import Parallel
from fivefold.data.writer import TokenWriter
from fivefold.parallel.mesh import connect
from tests.parity.cases import Case
from tests.parity.layouts import run_fault, run_layout, run_validation
from tests.parity.reference import reference
from tests.ranks import run_on_ranks

TOLERANCE = 1e-10
STAGES = (0, 1, 2, 3)
LAYOUTS = {
    1: [Case("llama", 1, 2, True)],
    2: [Case(model, zero, 1, True) for model in ("llama", "bloom-tied") for zero in STAGES]
    + [Case("llama-tied", 1, 4, False), Case("qwen3", 3, 2, True)],
    4: [Case(model, zero, 1, True) for model in ("llama-tied", "bloom-tied") for zero in STAGES]
    + [Case("qwen3", 1, 2, False), Case("narrow", 3, 1, True)],  # 6 rows on 4 ranks are 2, 2, 2 and none
}
FAULTY = Case("llama", 1, 2, False)
FAULTS = (math.inf, -math.inf, math.nan)
FAULTY_PARAMETER = "layers.3.ffn.down.weight"
VALIDATED = Case("llama", 1, 2, False)


@pytest.fixture(scope="module")
def token_sets(tmp_path_factory):
    """By name: 13 windows of 24 targets in documents of unequal length, and a single window."""
    generator = np.random.default_rng(0)
    folders = {}
    for name, lengths in {"thirteen": (100, 3, 90, 60, 45, 10, 2), "one": (20,)}.items():
        folders[name] = tmp_path_factory.mktemp(name)
        writer = TokenWriter(folders[name], 1003, eod=0)
        writer.write(generator.integers(1, 1003, sum(lengths)), np.array(lengths))
        writer.close()
    return folders


@pytest.fixture(scope="module")
def results(tmp_path_factory, token_sets):
    """What every rank of every number of ranks found: one set of processes a number, and this process for one rank."""
    found = {}
    for world, layouts in LAYOUTS.items():
        calls = [(run_layout, (case,)) for case in layouts]
        calls += [(run_fault, (FAULTY, value, FAULTY_PARAMETER)) for value in FAULTS] if world == 2 else []
        calls += [(run_validation, (VALIDATED, str(folder), 2)) for folder in token_sets.values()]
        if world == 1:
            with connect(Parallel()):
                by_rank = [[function(*arguments)] for function, arguments in calls]
        else:
            by_rank = run_on_ranks(world, calls, tmp_path_factory.mktemp(f"ranks{world}"))
        found |= {(world, *call): result for call, result in zip(calls, by_rank, strict=True)}
    return found


expected = functools.cache(reference)


@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world, cases in LAYOUTS.items() for case in cases], ids=str
)
def test_a_layout_equals_one_process(results, world, case):
    theirs = expected(case.model, case.packed)
    for ours in results[world, run_layout, (case,)]:
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=TOLERANCE)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=TOLERANCE)
        for kind in ("gradients", "parameters"):
            assert list(ours[kind]) == list(theirs[kind])
            total = torch.stack([tensor.norm() for tensor in theirs[kind].values()]).norm()
            for name, tensor in theirs[kind].items():
                error = (ours[kind][name] - tensor).norm() / torch.maximum(tensor.norm(), 1e-6 * total)
                assert error <= TOLERANCE, f"{kind} of {name}: relative error {error:.1e}"


@pytest.mark.parametrize("value", FAULTS)
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing_on_any_and_is_named(results, value):
    index = [v if not math.isnan(v) else None for v in FAULTS].index(None if math.isnan(value) else value)
    for result in results[2, run_fault, (FAULTY, FAULTS[index], FAULTY_PARAMETER)]:
        assert not math.isfinite(result["norm"])
        assert result["changed"] == []
        assert result["not finite"] == [FAULTY_PARAMETER]


@pytest.mark.parametrize("name", ["thirteen", "one"])
def test_validation_gives_the_same_value_on_any_number_of_ranks(results, token_sets, name):
    values = [
        value for world in LAYOUTS for value in results[world, run_validation, (VALIDATED, str(token_sets[name]), 2)]
    ]
    assert len(values) == 7
    assert values == pytest.approx([values[0]] * 7, rel=TOLERANCE)
