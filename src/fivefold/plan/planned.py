"""A run on a known number of ranks, checked: what `fivefold plan` and `plan(run)` start from.

A plan asks only whether a run is legal. What this version cannot train although it is legal is noted, not refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.config.files import ConfigError
from fivefold.config.layout_rules import ranks_a_replica
from fivefold.config.notable import notes_on
from fivefold.config.rule import Rule
from fivefold.config.rules import LEGALITY, NOT_YET, broken_rules, check, with_world
from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.hardware.rule import ACCELERATOR, ACCELERATOR_SAID
from fivefold.parallel.grid import Grid
from fivefold.pipeline.schedule import Schedule
from fivefold.plan.execution import OURS, Execution
from fivefold.plan.forecast import FAILURES, Forecast, forecast
from fivefold.plan.pipeline import pipeline_schedule
from fivefold.plan.ranks import Ranks, ranks
from fivefold.plan.vocabulary import VOCABULARY_SAID, vocabulary_notes, with_known_vocabulary

if TYPE_CHECKING:
    from fivefold.plan.dry_run import RankBuild


@dataclass(frozen=True)
class Plan:
    """A legal run on a known number of ranks."""

    run: Run
    """With the number of ranks and dp filled in, and the vocabulary if the data says it."""
    grid: Grid
    schedule: Schedule | None
    """Of the pipeline; None with a single stage."""
    notes: tuple[str, ...]
    """What is legal, and should be known: that this version cannot train it, or that a key does nothing."""

    def ranks(self) -> Ranks:
        """What each rank is. Raises UserError if stages are to be balanced and nothing says the vocabulary."""
        return ranks(self.run, self.grid, self.schedule, self.notes)

    def forecast(self, failures: str | float = FAILURES, execution: Execution = OURS) -> Forecast:
        """The run's time, memory, cost and storage on its cluster, where machines fail at this rate.

        By this project's software unless `execution` says another. Raises UserError if nothing says the accelerator or
        the vocabulary, or if a rate or number cannot be.
        """
        return forecast(self.run, self.schedule, self.notes, failures, execution)

    def build_rank(self, rank: int) -> RankBuild:
        """What rank `rank` holds, found by building it in this process, which must not be in a process group already.

        Loads torch. Raises UserError if there is no such rank, or if it cannot be built.
        """
        if not 0 <= rank < self.grid.world:
            raise UserError(f"there is no rank {rank}: the ranks of this run are 0 to {self.grid.world - 1}")
        from fivefold.plan.dry_run import build_rank

        placement = (0,) if self.schedule is None else self.schedule.placement
        return build_rank(self.run, self.grid, placement, self.notes, rank)


def plan(run: Run) -> Plan:
    """The plan of `run`.

    Raises ConfigError with all rules that the layout breaks, among them that nothing says how many ranks there are,
    UserError if the pipeline's schedule cannot run.
    """
    if RANKS_SAID.broken(run):
        raise ConfigError(check(run, rules=(*LEGALITY, ACCELERATOR, RANKS_SAID)))
    world = world_of(run)
    _check(run, world)
    run = with_world(run, world)
    on_vocabulary = vocabulary_notes(run)
    known = with_known_vocabulary(run)
    if known is not run:
        _check(known, world)
        run = known
    notes = (*(rule.says(run) for rule in broken_rules(run, NOT_YET)), *on_vocabulary, *notes_on(run))
    return Plan(run, Grid.of(run.parallel, world), pipeline_schedule(run), notes)


def _check(run: Run, world: int) -> None:
    if broken := check(run, world, (*LEGALITY, ACCELERATOR)):
        raise ConfigError(broken)


def world_of(run: Run) -> int:
    """The number of its ranks. Raises UserError if nothing says it."""
    if run.cluster.gpus != "auto":
        return run.cluster.gpus
    if run.parallel.dp != "auto":
        return run.parallel.dp * ranks_a_replica(run)
    raise UserError(_which_world(run))


def _which_world(run: Run) -> str:
    return (
        "how many ranks there are is not known; give --gpus N (cluster.gpus), or --parallel.dp N: the ranks are then "
        f"N x pp {run.parallel.pp} x cp {run.parallel.cp} x tp {run.parallel.tp}"
    )


RANKS_SAID = Rule(
    "the number of ranks is said",
    about=("cluster.gpus", "parallel.dp"),
    broken=lambda run: run.cluster.gpus == "auto" and run.parallel.dp == "auto",
    says=_which_world,
)
"""`cluster.gpus`, or parallel.dp, is a number; every plan asks that."""
GPUS_SAID = Rule(
    "the number of GPUs is said",
    about=("cluster.gpus",),
    broken=lambda run: run.cluster.gpus == "auto",
    says=lambda run: "how many GPUs there are is not known; give --gpus N (cluster.gpus)",
)
"""`cluster.gpus` is a number; a search asks that, for it finds parallel.dp itself."""
FORECAST: tuple[Rule, ...] = (RANKS_SAID, ACCELERATOR_SAID, VOCABULARY_SAID)
"""What a plan of time and memory has to know."""
SEARCH: tuple[Rule, ...] = (GPUS_SAID, ACCELERATOR_SAID, VOCABULARY_SAID)
"""What a search has to know."""
