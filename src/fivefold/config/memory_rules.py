"""Rules on memory: what is computed again in backward, and what is kept in CPU memory meanwhile."""

from __future__ import annotations

from fivefold.config.rule import Rule
from fivefold.config.run import Run


def _without(run: Run, thing: str) -> str:
    """What is offloaded, but for `thing`."""
    return ", ".join(kept for kept in run.offload if kept != thing)


def _all_activations(run: Run) -> str:
    """What is offloaded, with all activations in the place of heavy ones."""
    return ", ".join(dict.fromkeys(kept.removeprefix("heavy-") for kept in run.offload))


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
    Rule(
        "heavy activations are a part of all activations",
        about=("offload",),
        broken=lambda run: {"activations", "heavy-activations"} <= set(run.offload),
        says=lambda run: (
            f"offload = [{', '.join(run.offload)}]: activations are those of all layers, heavy-activations those of "
            f"some; use offload [{_without(run, 'heavy-activations')}], or "
            f"offload [{_without(run, 'activations')}]"
        ),
    ),
    Rule(
        "heavy activations are of one pipeline rank among several",
        about=("offload", "parallel.pp"),
        broken=lambda run: "heavy-activations" in run.offload and run.parallel.pp == 1,
        says=lambda run: (
            "offload heavy-activations evens out what the pipeline ranks keep, but parallel.pp = 1; "
            f"use offload [{_all_activations(run)}], or parallel.pp 2 or more"
        ),
    ),
)
"""What holds within recompute and offload."""
