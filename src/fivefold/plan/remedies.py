"""What would make a run fit that does not: changes of its layout, alone or two together, each told with its cost.

Two are tried of those kinds of change of which none is enough alone. What takes much longer (offload) or changes the
numbers (precision) is not tried. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import combinations, product
from typing import Any

from fivefold.config.files import difference
from fivefold.config.rule import divisors_of
from fivefold.config.rules import LEGALITY, check
from fivefold.config.run import RECOMPUTE_MODES, Recompute, Run
from fivefold.errors import UserError
from fivefold.plan.cluster import Cluster
from fivefold.plan.execution import OURS, Execution
from fivefold.plan.memory.fits import memory_if_it_fits
from fivefold.plan.memory.peak import GIB

Change = Callable[[Run], Run]
Way = list[Change]
"""Changes of one kind, the smallest first."""
FACTORS = (2, 4, 8)
"""Of a degree."""
SHOWN = 6
"""At most so many are told, the fastest first."""
TRIED = "recompute, schedule, tp, cp, pp, ep, ZeRO and micro-batch"
"""The kinds of change."""
PAIRS = 24
"""At most so many pairs of kinds are tried, so that a plan answers in a second."""


@dataclass(frozen=True)
class Remedy:
    """A change, or two together, after which the run fits."""

    flags: str
    """Of the command line, such as `--recompute.mode full`."""
    gib: float
    """That its fullest rank then needs, with what is beside tensors."""
    step_seconds: float

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    def line(self) -> str:
        """The flags with what they come to."""
        return f"{self.flags} ({self.gib:.1f} GiB, {self.step_seconds:.3g} s a step)"


def remedies(run: Run, cluster: Cluster, execution: Execution = OURS) -> tuple[Remedy, ...]:
    """What makes `run` fit, the fastest first; each keeps the batch and the number of accelerators."""
    return _Remedies(run, cluster, execution).found()


class _Remedies:
    """The changes of one run."""

    def __init__(self, run: Run, cluster: Cluster, execution: Execution) -> None:
        self._run, self._cluster, self._execution = run, cluster, execution

    def found(self) -> tuple[Remedy, ...]:
        """Of each kind the smallest change that is enough, and of each two that are not what is enough together."""
        found, short = [], []
        for way in _ways(self._run, self._cluster):
            if remedy := self._first([change(self._run) for change in way]):
                found.append(remedy)
            else:
                short.append(way)
        for one, other in list(combinations(short, 2))[:PAIRS]:
            if remedy := self._together(one, other):
                found.append(remedy)
        return tuple(sorted(found, key=lambda remedy: remedy.step_seconds)[:SHOWN])

    def _first(self, runs: list[Run]) -> Remedy | None:
        return next((remedy for run in runs if (remedy := self._tried(run))), None)

    def _together(self, one: Way, other: Way) -> Remedy | None:
        """The smallest two changes that are enough; if the greatest are not, no others are tried."""
        steps = sorted(product(range(len(one)), range(len(other))), key=sum)
        runs = [run for first, second in steps if self._legal(run := other[second](one[first](self._run)))]
        return self._first(runs) if runs and self._tried(runs[-1]) else None

    def _legal(self, run: Run) -> bool:
        return not check(run, self._cluster.gpus, LEGALITY)

    def _tried(self, run: Run) -> Remedy | None:
        """None if the changed run is illegal, or does not fit either."""
        if not self._legal(run):
            return None
        try:
            found = memory_if_it_fits(run, self._cluster, self._execution)
            if found is None:
                return None
            seconds = self._execution.step_time(run, self._cluster).seconds
        except UserError:
            return None
        return Remedy(self._flags(run), found.worst.needed / GIB, seconds)

    def _flags(self, run: Run) -> str:
        """What tells the changed run from the one there is."""
        return " ".join(f"--{key} {'null' if value is None else value}" for key, _, value in difference(self._run, run))


def _ways(run: Run, cluster: Cluster) -> Iterator[Way]:
    """The kinds of change that save memory, those first that go best together with others."""
    parallel, batch = run.parallel, run.batch
    yield [_recomputed(mode) for mode in RECOMPUTE_MODES[RECOMPUTE_MODES.index(run.recompute.mode) + 1 :]]
    if parallel.pp > 1 and parallel.schedule != "1f1b":
        yield [_laid(schedule="1f1b", chunks=1, schedule_memory=None)]
    for axis, most in (("tp", cluster.domain), ("cp", cluster.gpus), ("pp", run.model.layers)):
        degrees = [getattr(parallel, axis) * factor for factor in FACTORS]
        yield [_cut(cluster, axis, degree) for degree in degrees if degree <= most]
    if run.model.moe is not None:
        yield [_laid(ep=parallel.ep * factor) for factor in FACTORS]
    yield [_laid(zero=zero) for zero in range(parallel.zero + 1, 4)]
    yield [_sized(size) for size in reversed(divisors_of(batch.micro_size)[:-1])]


def _cut(cluster: Cluster, axis: str, degree: int) -> Change:
    """Another degree along an axis, and as many replicas as are left; illegal if that is no whole number."""

    def changed(run: Run) -> Run:
        cut = _laid(**{axis: degree})(run)
        return _laid(dp=cluster.gpus // (cut.parallel.pp * cut.parallel.tp * cut.parallel.cp))(cut)

    return changed


def _recomputed(mode: Any) -> Change:
    return lambda run: run.model_copy(update={"recompute": Recompute(mode=mode)})


def _laid(**changes: Any) -> Change:
    return lambda run: run.model_copy(update={"parallel": run.parallel.model_copy(update=changes)})


def _sized(micro_size: int) -> Change:
    return lambda run: run.model_copy(update={"batch": run.batch.model_copy(update={"micro_size": micro_size})})
