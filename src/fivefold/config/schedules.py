"""The pipeline schedules that a run can name, and what each demands of the run: chunks a rank, and microbatches.

The rules read this table, and `pipeline/named.py` builds on it, so that neither is behind the other. A schedule that
another package registers under `fivefold.schedules` states the same demands. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fivefold import plugins


@dataclass(frozen=True)
class Demands:
    """What a named schedule asks of a run."""

    chunks: int | None
    """Model chunks a rank that it is made for; None for any number."""
    splits: bool
    """Whether its backward comes in two halves, the input's gradient (I) and the weights' (W)."""
    microbatches_a_rank: int = 0
    """Microbatches a step for each rank of the pipeline that it needs at least; 0 if one microbatch will do."""

    def fewest(self, ranks: int) -> int:
        """The smallest number of microbatches a step on `ranks` pipeline ranks."""
        return max(1, self.microbatches_a_rank * ranks)


SCHEDULES: Mapping[str, Demands] = {
    "naive": Demands(chunks=1, splits=False),
    "gpipe": Demands(chunks=1, splits=False),
    "1f1b": Demands(chunks=1, splits=False),
    "interleaved": Demands(chunks=None, splits=False),
    "zb-h1": Demands(chunks=1, splits=True),
    "zb-h2": Demands(chunks=1, splits=True),
    "zb-v": Demands(chunks=2, splits=True),
    "dualpipe-v": Demands(chunks=2, splits=True, microbatches_a_rank=2),
    "auto": Demands(chunks=None, splits=True),
}
"""Those that ship with Fivefold, plainest first."""


def is_file(schedule: str) -> bool:
    """Whether `parallel.schedule` is a CSV file, and not a name."""
    return schedule.endswith(".csv")


def schedule_names() -> list[str]:
    """Every name that `parallel.schedule` may be: the built-in ones, then those that others registered."""
    return [*SCHEDULES, *(name for name in plugins.names("schedules", ()) if name not in SCHEDULES)]


def demands_of(name: str) -> Demands:
    """What the schedule called `name` demands.

    Raises UserError if there is none, or if what is registered under the name cannot be imported.
    """
    return plugins.find("schedules", name, SCHEDULES)
