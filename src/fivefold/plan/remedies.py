"""What would make a run fit that does not: single changes of its layout, each tried and told with its cost.

Where no single change is enough, each is tried together with full recompute. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.config.rules import LEGALITY, check
from fivefold.config.run import RECOMPUTE_MODES, Recompute, Run
from fivefold.errors import UserError
from fivefold.plan.cluster import Cluster
from fivefold.plan.execution import OURS, Execution
from fivefold.plan.memory import GIB, memory
from fivefold.plan.time import step_time

Way = list[tuple[str, Run]]
"""Changes of one kind as flags and the changed run, the smallest first."""
FACTORS = (2, 4, 8)
"""Of a degree."""
SHOWN = 6
"""At most so many are told, the fastest first."""


@dataclass(frozen=True)
class Remedy:
    """A change after which the run fits."""

    flags: str
    """Of the command line, such as `--recompute.mode full`."""
    gib: float
    """That its fullest rank then needs, with what is beside tensors."""
    step_seconds: float

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)


def remedies(run: Run, cluster: Cluster, execution: Execution = OURS) -> tuple[Remedy, ...]:
    """The changes that make `run` fit, the fastest first; each keeps the batch and the number of accelerators."""
    found = _found(list(_changes(run, cluster)), cluster, execution)
    if not found and run.recompute.mode != "full":
        changes = [
            [(f"{flags} --recompute.mode full", _recomputed(changed, "full")) for flags, changed in way]
            for way in _changes(run, cluster)
        ]
        found = _found(changes, cluster, execution)
    return tuple(sorted(found, key=lambda remedy: remedy.step_seconds)[:SHOWN])


def _found(ways: Sequence[Way], cluster: Cluster, execution: Execution) -> list[Remedy]:
    """Of each way the first change that is enough."""
    tried = ((remedy for flags, run in way if (remedy := _tried(flags, run, cluster, execution))) for way in ways)
    return [remedy for each in tried if (remedy := next(each, None))]


def _changes(run: Run, cluster: Cluster) -> Iterator[Way]:
    """The ways to save memory."""
    parallel, batch = run.parallel, run.batch
    yield [
        (f"--recompute.mode {mode}", _recomputed(run, mode))
        for mode in RECOMPUTE_MODES[RECOMPUTE_MODES.index(run.recompute.mode) + 1 :]
    ]
    yield [(f"--parallel.zero {zero}", _laid(run, zero=zero)) for zero in range(parallel.zero + 1, 4)]
    if batch.micro_size > 1:
        single = run.model_copy(update={"batch": batch.model_copy(update={"micro_size": 1})})
        yield [("--batch.micro_size 1", single)]
    for axis, most in (("pp", run.model.layers), ("tp", cluster.domain), ("cp", cluster.gpus)):
        degrees = [getattr(parallel, axis) * factor for factor in FACTORS]
        yield [_cut(run, cluster, axis, degree) for degree in degrees if degree <= most]


def _cut(run: Run, cluster: Cluster, axis: str, degree: int) -> tuple[str, Run]:
    """With another degree along an axis, and as many replicas as are left; illegal if that is no whole number."""
    cut = _laid(run, **{axis: degree})
    dp = cluster.gpus // (cut.parallel.pp * cut.parallel.tp * cut.parallel.cp)
    return f"--parallel.{axis} {degree} --parallel.dp {dp}", _laid(cut, dp=dp)


def _recomputed(run: Run, mode: Any) -> Run:
    return run.model_copy(update={"recompute": Recompute(mode=mode)})


def _laid(run: Run, **changes: int) -> Run:
    return run.model_copy(update={"parallel": run.parallel.model_copy(update=changes)})


def _tried(flags: str, run: Run, cluster: Cluster, execution: Execution) -> Remedy | None:
    """None if the changed run is illegal, or does not fit either."""
    if check(run, cluster.gpus, LEGALITY):
        return None
    software = execution.software(run.parallel)
    try:
        found = memory(run, cluster, software)
        if not found.fits:
            return None
        seconds = step_time(run, cluster, software).seconds
    except UserError:
        return None
    return Remedy(flags, found.worst.needed / GIB, seconds)
