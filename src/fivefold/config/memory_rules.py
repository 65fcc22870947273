"""Rules on memory: what is computed again in backward, and what is kept in CPU memory meanwhile."""

from __future__ import annotations

from fivefold.config.rule import Rule

MEMORY: tuple[Rule, ...] = (
    Rule(
        "recompute of every n-th layer has a mode",
        about=("recompute.mode", "recompute.every"),
        broken=lambda run: run.recompute.mode == "none" and run.recompute.every != 1,
        says=lambda run: (
            f"recompute.every = {run.recompute.every} chooses layers, but recompute.mode = none recomputes nothing; "
            "use recompute.mode selective or full, or recompute.every 1"
        ),
    ),
    Rule(
        "weights in CPU memory are updated there",
        about=("offload",),
        broken=lambda run: "parameters" in run.offload and "optimizer" not in run.offload,
        says=lambda run: (
            f"offload = [{', '.join(run.offload)}]: the update happens where the parameters are, so the optimizer's "
            f"state is there too; use offload [{', '.join(['optimizer', *run.offload])}]"
        ),
    ),
)
"""What holds within recompute and offload."""
