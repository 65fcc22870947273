"""What must hold for a run: one table of rules, checked together in milliseconds, without a GPU.

A rule has a predicate and a sentence that prints the numbers and says what to change. `check` asks all of them, so that
every broken rule is heard at once; with a number of ranks it also asks those that need the real world. The rows stand
by subject: single values in `ranges.py`, the architecture in `model_rules.py`, experts in `expert_rules.py`, ranks,
batch and stages in `layout_rules.py`, the pipeline's schedule in `pipeline_rules.py`, what tp and cp cut in
`split_rules.py`, recompute and offload in `memory_rules.py`, the length of the run here. They make a run legal; what
this version cannot train although it is legal stands in `not_yet.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.config.expert_rules import EXPERTS
from fivefold.config.layout_rules import LAYOUT, with_world
from fivefold.config.memory_rules import MEMORY
from fivefold.config.model_rules import MODEL
from fivefold.config.not_yet import NOT_YET
from fivefold.config.pipeline_rules import PIPELINE
from fivefold.config.ranges import RANGES
from fivefold.config.rule import Rule
from fivefold.config.run import Run
from fivefold.config.split_rules import SPLITS

__all__ = ["FORWARD", "LEGALITY", "NOT_YET", "RULES", "Rule", "broken_rules", "check", "with_world"]


def _one_length(run: Run) -> bool:
    return (run.steps is None) != (run.tokens is None)


def _steps_after_warmup(run: Run) -> int:
    return run.total_steps - round(run.optim.warmup_fraction * run.total_steps)


LENGTH: tuple[Rule, ...] = (
    Rule(
        "a run has steps or tokens",
        about=("steps", "tokens"),
        broken=lambda run: not _one_length(run),
        says=lambda run: (
            "the run has neither steps nor tokens; give one of them"
            if run.steps is None
            else f"steps = {run.steps} and tokens = {run.tokens:g} are both given; give one (the other: null)"
        ),
    ),
    Rule(
        "the decay fits after the warm-up",
        about=("optim.decay_steps", "optim.warmup_fraction", "steps", "tokens", "batch.global_size", "data.seq_len"),
        broken=lambda run: (
            _one_length(run) and run.optim.decay_steps is not None and run.optim.decay_steps > _steps_after_warmup(run)
        ),
        says=lambda run: (
            f"optim.decay_steps = {run.optim.decay_steps} is more than the {_steps_after_warmup(run)} steps that the "
            f"warm-up leaves (of {run.total_steps} steps, warmup_fraction {run.optim.warmup_fraction:g}); use fewer, "
            "or null for the decay's own length"
        ),
    ),
    Rule(
        "a constant rate has no decay",
        about=("optim.decay", "optim.decay_steps"),
        broken=lambda run: run.optim.decay == "constant" and run.optim.decay_steps is not None,
        says=lambda run: (
            f"optim.decay = constant has no decay, but optim.decay_steps = {run.optim.decay_steps}; set it to null, "
            "or use optim.decay wsd (constant, then linear)"
        ),
    ),
)

LEGALITY: tuple[Rule, ...] = (*RANGES, *MODEL, *LAYOUT, *PIPELINE, *SPLITS, *EXPERTS, *MEMORY, *LENGTH)
"""What makes a run legal, single values first."""

OF_TRAINING = frozenset(
    {
        "microbatches make up the batch",
        "the schedule has the microbatches that it needs",
        "only the greedy schedule has a memory limit",
        "the rate of biases has biases",
        "the weight of multi-token prediction has some",
        "checkpoints come every so often",
        *(rule.name for rule in (*MEMORY, *LENGTH)),
    }
)
"""Names of the rules on what a pass forward alone lacks: a batch to make up, a backward, an optimizer, a length."""

FORWARD: tuple[Rule, ...] = tuple(rule for rule in LEGALITY if rule.name not in OF_TRAINING)
"""What makes a run legal of which only the forward of the model is to run."""

RULES: tuple[Rule, ...] = (*LEGALITY, *NOT_YET)
"""What a run must obey for this version to train it."""


def check(run: Run, world: int | None = None, rules: Sequence[Rule] = RULES) -> list[str]:
    """One sentence for each of `rules` that `run` breaks; an empty list if it obeys them all.

    With `world`, the number of ranks that will really run, the layout must fit it; without, `cluster.gpus` if given.
    """
    run = with_world(run, run.cluster.gpus if world is None else world)
    return [rule.says(run) for rule in broken_rules(run, rules)]


def broken_rules(run: Run, rules: Sequence[Rule] = RULES) -> list[Rule]:
    """The rules that `run` breaks. A key whose own value is impossible is left out of those that follow."""
    impossible: set[str] = set()
    broken = []
    for rule in rules:
        if impossible.isdisjoint(rule.about) and rule.broken(run):
            broken.append(rule)
            if len(rule.about) == 1:
                impossible.update(rule.about)
    return broken
