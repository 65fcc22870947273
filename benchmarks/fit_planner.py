"""Finds the planner's constants: those with which the published runs come out best. Writes plan/constants.json.

    python benchmarks/fit_planner.py [--out FILE] [--start FILE] [--rounds N]

The rows are those that ship with the package, without the doubtful ones. What is made small is a sum of absolute errors
of the logarithm of the step time, so that a few strange rows do not bend the rest, plus a mild pull of each constant
towards a value that is plausible by itself (PRIORS), which decides where no row does. Weighted least squares are solved
again and again, each row weighed by the inverse of its error (iteratively reweighted least squares), with derivatives
by differences. `fit.Refit` fits without some rows: what `fivefold validate-plan --leave-one-out` runs. The allocator's
gaps are fitted by themselves, on the memory of rows that say all it depends on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fivefold.plan.constants import FILE
from fivefold.plan.published import fit
from fivefold.plan.published.rows import read_rows
from fivefold.plan.software import UNFUSED


def main() -> None:
    """Fit to all rows and say how well they come out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=FILE)
    parser.add_argument("--start", type=Path, default=None, help="a table to start from; default: the priors")
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    published = read_rows()
    rows = [row for row in published if fit.usable(row)]
    start = fit.PRIORS if asked.start is None else json.loads(asked.start.read_text(encoding="utf-8"))
    table = fit.fitted(rows, start, rounds=asked.rounds, say=print)
    table["generations"][UNFUSED]["gaps"] = fit.gaps(published)
    asked.out.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
