"""The parity harness: a layout runs on its ranks and is compared with one process.

Use `harness.difference(case)`: None if every rank computed the same losses, gradient norms, gradients and parameters
as one process, and all copies of a parameter are the same bytes; else the first thing that differs, by name.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.parity.cases import Case
from tests.parity.pieces import TOLERANCE, differing_copies, faults
from tests.parity.rank import Outcome, run_steps
from tests.parity.reference import Reference, reference
from tests.ranks import Crew


class Harness:
    """One crew for all layouts."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew

    def run(self, case: Case) -> list[Outcome]:
        """What each rank saw."""
        return self.crew.run(case.world, run_steps, case)

    def difference(self, case: Case) -> str | None:
        """The first thing in which the layout differs from one process, and how many there are."""
        found = list(differences(reference(case.model, case.packed, case.rows, case.steps), self.run(case)))
        return f"{found[0]} (the first of {len(found)} differences)" if found else None


def differences(expected: Reference, ranks: list[Outcome]) -> Iterator[str]:
    """Everything in which the ranks differ from one process, gradients first: they say best what is wrong."""
    yield from faults("gradient", expected.gradients, [rank.gradients for rank in ranks], TOLERANCE)
    yield from wrong_figures(expected, ranks)
    yield from faults("parameter", expected.parameters, [rank.parameters for rank in ranks], TOLERANCE)
    yield from differing_copies([rank.parameters for rank in ranks])


def wrong_figures(expected: Reference, ranks: list[Outcome]) -> Iterator[str]:
    """Losses and norms, in the order in which they were computed."""
    for step in range(len(expected.losses)):
        for kind in ("losses", "norms"):
            theirs = getattr(expected, kind)[step]
            for number, rank in enumerate(ranks):
                ours = getattr(rank, kind)[step]
                if not abs(ours - theirs) <= TOLERANCE * abs(theirs):
                    yield f"{kind} on rank {number}: {ours!r} and not {theirs!r} in step {step}"
