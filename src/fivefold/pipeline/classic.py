"""Schedules whose backward is one piece: naive, GPipe, 1F1B and interleaved 1F1B.

In all four a rank runs some forwards ahead, then one forward and one backward in turn, then the backwards that are
left. They differ in how many forwards are ahead, and in which order chunks take turns. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

from fivefold.pipeline.schedule import Action, Kind, Schedule, looped


def naive(ranks: int, microbatches: int) -> Schedule:
    """One microbatch after the other, forward and backward; all ranks but one are idle at any time."""
    return _one_chunk("naive", ranks, microbatches, ahead=lambda rank: 0)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019): the bubble of 1F1B, all microbatches held at once."""
    return _one_chunk("gpipe", ranks, microbatches, ahead=lambda rank: microbatches)


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """1F1B (Narayanan et al. 2019): bubble (p-1)/(m+p-1); rank r holds at most p - r microbatches."""
    return _one_chunk("1f1b", ranks, microbatches, ahead=lambda rank: ranks - 1 - rank)


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over `chunks` model chunks a rank (Narayanan et al. 2021): bubble / chunks, communication x chunks.

    Microbatches pass a chunk in groups. The paper has groups of as many as there are ranks; where they do not come out
    even, the groups here are as equal as can be with at least that many, so that a group's first microbatch is back for
    its next chunk before the rank runs out of work, and the bubble stays that of the paper. A group larger than the
    ranks costs memory: a rank holds up to (chunks - 1) x group + 2 x (ranks - 1) + 1 activations of a chunk.
    """
    groups = _groups(ranks, microbatches)
    forwards = [(chunk, microbatch) for group in groups for chunk in range(chunks) for microbatch in group]
    backwards = [(chunk, microbatch) for group in groups for chunk in reversed(range(chunks)) for microbatch in group]
    ahead = (chunks - 1) * max(map(len, groups))

    def actions(kind: Kind, rank: int, order: Sequence[tuple[int, int]]) -> list[Action]:
        return [Action(kind, chunk * ranks + rank, microbatch) for chunk, microbatch in order]

    orders = tuple(
        _in_turn(actions("F", rank, forwards), actions("B", rank, backwards), ahead + 2 * (ranks - 1 - rank))
        for rank in range(ranks)
    )
    return Schedule("interleaved", orders, looped(ranks, chunks), microbatches)


def _one_chunk(name: str, ranks: int, microbatches: int, ahead: Callable[[int], int]) -> Schedule:
    """The schedule of one stage a rank in which a rank runs `ahead(rank)` forwards before it takes turns."""

    def order(rank: int) -> tuple[Action, ...]:
        forwards = [Action("F", rank, microbatch) for microbatch in range(microbatches)]
        backwards = [Action("B", rank, microbatch) for microbatch in range(microbatches)]
        return _in_turn(forwards, backwards, ahead(rank))

    return Schedule(name, tuple(map(order, range(ranks))), looped(ranks, 1), microbatches)


def _in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""

    def rest() -> Iterator[Action]:
        for pair in zip_longest(forwards[ahead:], backwards):
            yield from (action for action in pair if action is not None)

    return (*forwards[:ahead], *rest())


def _groups(ranks: int, microbatches: int) -> list[range]:
    """The microbatches in order, in as many groups of at least `ranks` as there can be, as equal as can be."""
    count = max(1, microbatches // ranks)
    ends = [microbatches * group // count for group in range(count + 1)]
    return [range(ends[group], ends[group + 1]) for group in range(count)]
