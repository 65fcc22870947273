"""What flows between the actions of a schedule: each needs the output of at most one other, wherever that one runs.

The simulator, the checker and the communication pass ask here, so that they agree. Imports no torch.
"""

from __future__ import annotations

from fivefold.pipeline.schedule import Action


def gives(action: Action) -> Action:
    """The output of `action`, named as its maker; the gradient that I or B gives on is named as B's."""
    kind, stage, microbatch = action
    return Action("B", stage, microbatch) if kind == "I" else action


def needs(action: Action, stages: int) -> Action | None:
    """Whose output `action` waits for, named as `gives` names it; None for the first stage's F.

    F needs the F of the stage before. I and B need the gradient from the stage after, and in the last stage their own
    F; W needs its own I. That I and B follow their own F in the other stages too is a consequence.
    """
    kind, stage, microbatch = action
    if kind == "F":
        return Action("F", stage - 1, microbatch) if stage else None
    if kind == "W":
        return Action("B", stage, microbatch)
    return Action("F", stage, microbatch) if stage == stages - 1 else Action("B", stage + 1, microbatch)


def receiver(action: Action, stages: int) -> int | None:
    """The stage that takes in what `action` gives; None for W, the last stage's F and the first stage's I and B."""
    if action.kind == "W":
        return None
    stage = action.stage + (1 if action.kind == "F" else -1)
    return stage if 0 <= stage < stages else None
