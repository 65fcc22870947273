"""The layout that trains a run fastest on its cluster, by the planner's own memory and time.

Layouts come by arithmetic (`space.py`), and those whose middle stage alone does not fit go first. The others are
looked at with the least possible time first, each timed under 1f1b and then under the schedules that may be faster,
until none that is left can be among the best (`bounds.py`). What is recommended stands in `ranking.py`.
Of a family (tp, pp, ep) only the best is shown. The user's own layout takes part if it is legal and fits. Nothing
of the run but its layout, micro-batch, recompute and schedule changes. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

from fivefold.config.files import ConfigError, dump_run, load_run
from fivefold.config.rules import LEGALITY, NOT_YET, broken_rules, check, with_world
from fivefold.config.run import Parallel, Recompute, Run
from fivefold.errors import UserError
from fivefold.outputs import write_file
from fivefold.plan.cluster import Cluster
from fivefold.plan.execution import OURS, Execution, check_hot_experts
from fivefold.plan.memory.peak import memory
from fivefold.plan.search.bounds import LeastMemory, least_seconds, lightest, without_end
from fivefold.plan.search.ranking import Ranking
from fivefold.plan.search.reasons import Layout, Own, miss_lines, own_lines, table
from fivefold.plan.search.space import Degrees, degrees, run_of, schedules
from fivefold.plan.software import Software
from fivefold.plan.time.step import StepTime, step_time
from fivefold.plan.vocabulary import with_vocabulary

NEAR_MISSES = 6
"""Of the layouts that do not fit, so many with the least state and activations are counted whole."""
EVERY = 2.0
"""Seconds between lines of progress."""


@dataclass(frozen=True)
class Found:
    """What a search found."""

    best: tuple[Layout, ...]
    """The recommended one, then the fastest first, one of each family."""
    own: Own
    """The run's own layout against them."""
    miss: Layout | None
    """If nothing fits: what comes nearest."""
    looked: dict[str, int]
    """How many layouts there were, how many of them could fit, and how many were timed under some schedule."""
    seconds: float
    """That the search took."""
    notes: tuple[str, ...] = ()
    """What this version cannot train whatever the layout."""
    execution: Execution = OURS

    def json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "best": [each.json(self.best[0]) for each in self.best],
            "own": self.own.json(),
            "nearest_miss": None if self.miss is None else self.miss.json(),
            "looked": self.looked,
            "seconds": self.seconds,
            **self.execution.json(),
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """For the terminal."""
        looked = self.looked
        head = (
            f"{looked['layouts']:,} layouts divide the ranks, the batch and the model; {looked['room']:,} could fit; "
            f"{looked['timed']:,} timed in {self.seconds:.1f} s"
        )
        lines = [head, *self.execution.lines(), ""]
        lines += table(self.best) if self.best else miss_lines(self.miss)
        return [*lines, "", *own_lines(self.own), *(f"note: {note}" for note in self.notes)]

    def write(self, file: Path) -> None:
        """Writes the best layout as a run file that trains, and reads it again.

        Raises UserError if nothing fits, if this version cannot train the run whatever its layout, or if the file
        cannot be written.
        """
        if not self.best:
            raise UserError(f"{file} is not written: {miss_lines(self.miss)[0]}")
        if self.notes:
            raise ConfigError(self.notes, f"{file} is not written, as this version cannot train the run")
        write_file(file, dump_run(self.best[0].run))
        load_run(file)


def search(
    run: Run,
    cluster: Cluster,
    execution: Execution = OURS,
    top: int = 10,
    say: Callable[[str], None] = lambda line: None,
) -> Found:
    """The fastest legal layouts of a run that fit, of `cluster.gpus` ranks, as `execution` says they run.

    `say` hears of the progress. Raises ConfigError with the rules that the run breaks whatever its layout, UserError if
    the vocabulary is not known or no layout divides the ranks and the batch.
    """
    return _Search(run, cluster, execution, top, say).found()


_Waiting = tuple[float, Degrees, StepTime | None]
"""Seconds that a layout takes at least, and once it has been timed its step under 1f1b."""


class _Search:
    """One search."""

    def __init__(self, run: Run, cluster: Cluster, execution: Execution, top: int, say: Callable[[str], None]) -> None:
        self._began = self._said = time.monotonic()
        self._cluster, self._execution, self._say = cluster, execution, say
        self._run = with_vocabulary(run)
        check_hot_experts(run.model, run.model.moe.experts if run.model.moe else 1, execution.hot_experts)
        self._base = with_world(_without_layout(self._run), cluster.gpus)
        self._ranking = Ranking(top)
        self._least_memory, self._capacity = LeastMemory(self._base), cluster.accelerator.memory
        self._looked = {"layouts": 0, "room": 0, "timed": 0}

    def found(self) -> Found:
        """All of it."""
        own = self._own()
        if isinstance(own, Layout) and own.memory.fits:
            parallel = own.run.parallel
            self._ranking.add((parallel.tp, parallel.pp, parallel.ep), own)
        fitting, near = self._with_room()
        self._look(self._waiting(fitting))
        best = self._ranking.shown()
        notes = tuple(rule.says(self._base) for rule in broken_rules(self._base, NOT_YET))
        miss = None if best else self._nearest(near, fitting)
        verdict = Own(self._run, own, best[0] if best else None)
        return Found(best, verdict, miss, self._looked, time.monotonic() - self._began, notes, self._execution)

    def _own(self) -> Layout | list[str]:
        """The run's own layout; or the sentences of the rules that it breaks."""
        run = with_world(self._run, self._cluster.gpus)
        broken = check(run, self._cluster.gpus, LEGALITY)
        if broken:
            return broken
        try:
            return self._layout(run)
        except UserError as error:
            return [str(error)]

    def _layout(self, run: Run, step: StepTime | None = None) -> Layout:
        software = self._execution.software(run.parallel)
        step = step or step_time(run, self._cluster, software)
        return Layout(run, step, memory(run, self._cluster, software))

    def _stack(self, each: Degrees) -> Software:
        return self._execution.software_of(each.zero, each.pp, each.ep)

    def _with_room(self) -> tuple[list[Degrees], list[Degrees]]:
        """The layouts that could fit, and of the others those that come nearest."""
        fitting: list[Degrees] = []
        near: list[tuple[float, Degrees]] = []
        for each in degrees(self._run, self._cluster):
            self._looked["layouts"] += 1
            bytes = self._least_memory.of(each, self._stack(each))
            if bytes <= self._capacity:
                fitting.append(each)
            else:
                near = sorted([*near, (bytes, each)])[:NEAR_MISSES]
        if not self._looked["layouts"]:
            size, gpus = self._run.batch.global_size, self._cluster.gpus
            raise UserError(
                f"no layout of {gpus:,} GPUs shares out batch.global_size = {size:,} sequences and the model's heads "
                f"and layers; use a batch that is a multiple of {gpus:,}, or a number of GPUs that has more divisors"
            )
        self._looked["room"] = len(fitting)
        return fitting, [each for _, each in near]

    def _waiting(self, layouts: list[Degrees]) -> list[_Waiting]:
        """Each with the seconds that it takes at least: by the lightest of its kind, which alone is timed."""
        alike: dict[Degrees, list[Degrees]] = {}
        for each in layouts:
            alike.setdefault(lightest(each), []).append(each)
        found: list[_Waiting] = []
        for number, (light, kind) in enumerate(alike.items()):
            self._progress(partial(_count, number, len(alike)))
            step = self._plain(light)
            least = self._least(light, step, without_end(step))
            found += [(least, each, None) for each in kind]
        heapify(found)
        return found

    def _plain(self, each: Degrees) -> StepTime:
        """Under 1f1b."""
        return step_time(run_of(self._base, each), self._cluster, self._stack(each))

    def _least(self, each: Degrees, step: StepTime, under_1f1b: float) -> float:
        """Under any schedule, by its step under 1f1b."""
        if each.pp == 1:
            return under_1f1b
        microbatches = each.microbatches(self._run)
        others = (least_seconds(step, each.pp, microbatches, *other) for other in schedules(self._run, each))
        return min(under_1f1b, *others)

    def _look(self, waiting: list[_Waiting]) -> None:
        """At each in its turn, until no other can be shown: it is timed, and if it is then still worth it tried under
        all schedules."""
        while waiting:
            least, each, step = heappop(waiting)
            if least >= self._ranking.worst():
                break
            if least >= self._ranking.limit(each.family):
                continue
            self._progress(partial(self._state, least))
            if step is None:
                step = self._plain(each)
                heappush(waiting, (self._least(each, step, step.seconds), each, step))
            else:
                self._under_schedules(each, step)

    def _state(self, least: float) -> str:
        seconds = [each.step.seconds for each in self._ranking.best.values()]
        fastest = f"best so far {min(seconds):.3f} s" if seconds else "none fits so far"
        return f"{self._looked['timed']:,} schedules tried; {fastest}; those left take {least:.3f} s or more"

    def _under_schedules(self, each: Degrees, plain: StepTime) -> None:
        """Adds the layout under the fastest schedule with which it fits, if that is to be shown."""
        for seconds, name, chunks, step in self._by_time(each, plain):
            if seconds >= self._ranking.limit(each.family):
                return
            run = run_of(self._base, each, name, chunks)
            if check(run, self._cluster.gpus, LEGALITY):
                continue
            layout = self._layout(run, step)
            if layout.memory.fits:
                self._ranking.add(each.family, layout)
                return

    def _by_time(self, each: Degrees, plain: StepTime) -> Iterator[tuple[float, str, int, StepTime]]:
        """The schedules, the fastest first, as far as they can be shown."""
        software, microbatches = self._stack(each), each.microbatches(self._run)
        waiting = [(plain.seconds, "1f1b", 1, plain)]
        if self._least_memory.under(each, software, "1f1b", 1) > self._capacity:
            waiting = []
        others = [(least_seconds(plain, each.pp, microbatches, *other), *other) for other in schedules(self._run, each)]
        for least, name, chunks in sorted(others):
            if least >= self._ranking.limit(each.family):
                break
            if self._least_memory.under(each, software, name, chunks) > self._capacity:
                continue
            step = step_time(run_of(self._base, each, name, chunks), self._cluster, software)
            self._looked["timed"] += 1
            waiting.append((step.seconds, name, chunks, step))
        yield from sorted(waiting, key=lambda one: one[:3])

    def _nearest(self, near: list[Degrees], fitting: list[Degrees]) -> Layout | None:
        """Of the layouts that do not fit, whatever their bounds say, the one that is nearest to it, under 1f1b."""
        bounds = sorted((self._least_memory.of(each, self._stack(each)), each) for each in fitting)
        tried = [each for _, each in bounds[:NEAR_MISSES]] + near
        legal = [run for each in tried if not check(run := run_of(self._base, each), self._cluster.gpus, LEGALITY)]
        layouts = [self._layout(run) for run in legal]
        return min(layouts, key=lambda each: each.memory.worst.allocated, default=None)

    def _progress(self, line: Callable[[], str]) -> None:
        now = time.monotonic()
        if now - self._said > EVERY:
            self._said = now
            self._say(line())


def _count(number: int, layouts: int) -> str:
    return f"{number:,} of {layouts:,} kinds of layouts timed"


def _without_layout(run: Run) -> Run:
    """The run with the plainest layout. Raises ConfigError with the rules that it breaks even so."""
    plain = run.model_copy(
        update={
            "parallel": Parallel(cp_method=run.parallel.cp_method),
            "batch": run.batch.model_copy(update={"micro_size": 1}),
            "recompute": Recompute(),
            "cluster": run.cluster.model_copy(update={"gpus": "auto"}),
        }
    )
    if broken := check(plain, rules=LEGALITY):
        raise ConfigError(broken)
    return plain
