"""What the run file can say and this version cannot run: each with its own sentence, so that nothing is ignored.

Such a run is legal: it can be planned, and is refused where it would be trained. A row leaves this table in the commit
that makes it run.
"""

from __future__ import annotations

from typing import Any

from fivefold.config.rule import Rule, value_of


def _only(key: str, runs: Any, what: str) -> Rule:
    """`key` must be `runs`, because `what` is not in this version."""
    return Rule(
        f"{what} cannot run yet",
        about=(key,),
        broken=lambda run: value_of(run, key) != runs,
        says=lambda run: f"{key} = {value_of(run, key)}: this version does not run {what}; use {key} {runs}",
    )


NOT_YET: tuple[Rule, ...] = (
    _only("parallel.pp", 1, "pipeline parallelism"),
    _only("parallel.ep", 1, "expert parallelism"),
    _only("parallel.chunks", 1, "model chunks"),
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
        about=("precision.master", "precision.moments"),
        broken=lambda run: (
            run.precision.moments not in ("auto", "fp32" if run.precision.master == "auto" else run.precision.master)
        ),
        says=lambda run: (
            f"precision.moments = {run.precision.moments} with master {run.precision.master}: this version keeps the "
            "moments in the master weights' format; use precision.moments auto"
        ),
    ),
)
"""What cannot run yet."""
