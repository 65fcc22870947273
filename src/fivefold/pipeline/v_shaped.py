"""V-shaped schedules: ZB-V and DualPipe-V, in which the two chunks of a rank go down the ranks and up again.

Rank 0 has the first and the last stage, so a microbatch's backward begins where its forward began, and memory is the
same on all ranks. Each schedule is a table of phases; a phase is how often the rank does what. Imports no torch.

In a phase, F0 is the forward of the rank's first chunk, F1 that of its second; B and I likewise; W is the weight
gradient of the I that has waited longest; F0&B1 are a pair. Each takes the next microbatch that it has not had.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import cast

from fivefold.pipeline.schedule import Action, Kind, Pair, Schedule, Step, actions_of, v_shaped

_Phases = list[tuple[int, str]]


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al. 2024, 2405.15362): no bubble where F, I and W take the same and m >= 2p - 1, in 1F1B's memory.

    At most p activations on any rank. With fewer microbatches it is the schedule of 2p - 1 with the others left out:
    microbatches do not need each other, so what is left is sound.
    """
    full = max(microbatches, 2 * ranks - 1)

    def phases(rank: int) -> _Phases:
        after = ranks - 1 - rank
        return [
            (2 * after + 1, "F0"),
            (rank, "F1 F0"),
            (after + 1, "F1 I1 W"),
            (full - 2 * ranks + 1 + rank, "F0 I0 W F1 I1 W"),
            (after, "I0 W F1 I1 W"),
            (rank, "I0 I1"),
            (after + 1, "I0 W"),
            (2 * rank, "W"),
        ]

    orders = (_order(phases(rank), rank, ranks) for rank in range(ranks))
    kept = tuple(tuple(step for step in order if _has_only(step, microbatches)) for order in orders)
    return Schedule("zb-v", kept, v_shaped(ranks), microbatches)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe (DeepSeek-AI 2024, 2412.19437) cut in half: forwards and backwards run in pairs, which hide transfers.

    Half of the ranks of DualPipe, and one copy of the weights; as published at github.com/deepseek-ai/DualPipe. Needs
    m >= 2p; at most p + 1/2 activations on any rank.
    """

    def phases(rank: int) -> _Phases:
        after = ranks - 1 - rank
        paired = microbatches - 2 * ranks + 1 + rank
        whole = "B1 B0 " * (rank // 2) + ("B1 B0" if rank % 2 else "B1")
        split = ("" if rank % 2 else "I0 ") + "I1 I0 " * ((rank + 1) // 2)
        # The last rank's first backward would wait for the forward beside it, so it begins apart.
        first = "F0 B1 F1&B0" if after == 0 else "F0&B1 F1&B0"
        return [
            (2 * after, "F0"),
            (rank + 1, "F0 F1"),
            (after, "I1 W F1"),
            (1, first),
            (paired - 1, "F0&B1 F1&B0"),
            (after, "B1 F1&B0"),
            (1, whole),
            (1, split),
            (after, "W I0"),
            (rank + 1, "W"),
        ]

    orders = tuple(_order(phases(rank), rank, ranks) for rank in range(ranks))
    return Schedule("dualpipe-v", orders, v_shaped(ranks), microbatches)


def _order(phases: Iterable[tuple[int, str]], rank: int, ranks: int) -> tuple[Step, ...]:
    """The steps of one rank, phase after phase."""
    stages = (rank, 2 * ranks - 1 - rank)
    had: Counter[tuple[str, int]] = Counter()
    waiting: deque[Action] = deque()
    steps: list[Step] = []

    def action(word: str) -> Action:
        if word == "W":
            return waiting.popleft()
        kind, stage = word[0], stages[int(word[1])]
        pass_ = "forward" if kind == "F" else "backward"
        made = Action(cast(Kind, kind), stage, had[pass_, stage])
        had[pass_, stage] += 1
        if kind == "I":
            waiting.append(made._replace(kind="W"))
        return made

    for times, words in phases:
        for word in words.split() * times:
            forward, _, backward = word.partition("&")
            steps.append(Pair(action(forward), action(backward)) if backward else action(forward))
    return tuple(steps)


def _has_only(step: Step, microbatches: int) -> bool:
    return all(action.microbatch < microbatches for action in actions_of(step))
