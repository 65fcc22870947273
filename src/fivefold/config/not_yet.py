"""What the run file can say and this version cannot run: each with its own sentence, so that nothing is ignored.

Such a run is legal: it can be planned, and is refused where it would be trained. A row leaves this table in the commit
that makes it run.
"""

from __future__ import annotations

from typing import Any

from fivefold.config.rule import Rule, value_of
from fivefold.config.run import Run


def _only(key: str, runs: Any, what: str) -> Rule:
    """`key` must be `runs`, because `what` is not in this version."""
    return Rule(
        f"{what} cannot run yet",
        about=(key,),
        broken=lambda run: value_of(run, key) != runs,
        says=lambda run: f"{key} = {value_of(run, key)}: this version does not run {what}; use {key} {runs}",
    )


def _master(run: Run) -> str:
    """The format of the master weights."""
    if run.precision.master != "auto":
        return run.precision.master
    return "fp64" if run.precision.compute == "fp64" else "fp32"


NOT_YET: tuple[Rule, ...] = (
    _only("precision.linear", "auto", "8-bit and 4-bit linear layers"),
    Rule(
        "fp16 cannot run yet",
        about=("precision.compute",),
        broken=lambda run: run.precision.compute == "fp16",
        says=lambda run: (
            "precision.compute = fp16: this version does not scale the loss as fp16 needs; use bf16, fp32 or fp64"
        ),
    ),
    Rule(
        "moments of another format cannot run yet",
        about=("precision.compute", "precision.master", "precision.moments"),
        broken=lambda run: run.precision.moments not in ("auto", _master(run)),
        says=lambda run: (
            f"precision.moments = {run.precision.moments}, but master weights are in {_master(run)}"
            f"{' (auto)' if run.precision.master == 'auto' else ''}: this version keeps the moments in their format; "
            "use precision.moments auto"
        ),
    ),
)
"""What cannot run yet."""
