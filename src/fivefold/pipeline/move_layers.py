"""How many layers each stage has, made better by moving one layer at a time: for models whose layers differ.

Where all layers are alike, sharing them out one by one gives the best split. With dense layers in front of others that
have experts, which layers a stage has depends on all stages before it, and a split is found by its neighbours. Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fivefold.config.run import Model

Layers = tuple[int, int]
"""Of a stage, how many layers are dense ones in front of those with experts, and how many are others."""


def layers_differ(model: Model) -> bool:
    """Whether some layers have experts and others do not."""
    return model.moe is not None and model.moe.dense_layers > 0


def kinds(model: Model, counts: Sequence[int]) -> list[Layers]:
    """What kinds of layers the stages have, if they have so many."""
    left = model.moe.dense_layers if model.moe else 0
    stages = []
    for count in counts:
        dense = min(count, left)
        left -= dense
        stages.append((dense, count - dense))
    return stages


def moved(
    counts: Sequence[int],
    placement: Sequence[int],
    model: Model,
    load: Callable[[int, tuple[tuple[int, Layers], ...]], float],
) -> list[int]:
    """`counts` after each move of a layer that leaves the ranks' loads lower, the best move each time.

    `load` of a rank and of what each of its stages has. Loads are compared from the greatest down, so the greatest does
    not grow. The end is a split that no such move makes better, which need not be the best there is.
    """

    def loads(split: Sequence[int]) -> list[float]:
        by_rank: dict[int, list[tuple[int, Layers]]] = {}
        for stage, layers in enumerate(kinds(model, split)):
            by_rank.setdefault(placement[stage], []).append((stage, layers))
        return [load(rank, tuple(by_rank[rank])) for rank in sorted(by_rank)]

    best = list(counts)
    while True:
        now = loads(best)
        order = sorted(now, reverse=True)
        splits = _moves(model, best, placement, now.index(order[0]))
        found = min(((sorted(loads(split), reverse=True), split) for split in splits), default=(order, best))
        if found[0] >= order:
            return best
        best = found[1]


def _moves(model: Model, counts: Sequence[int], placement: Sequence[int], rank: int) -> Iterator[list[int]]:
    """Each way to move a layer that may help: from the fullest rank to another, or so that dense layers move."""
    front = [stage for stage, (dense, _) in enumerate(kinds(model, counts)) if dense]
    for giver, count in enumerate(counts):
        for taker, holder in enumerate(placement):
            helps = (placement[giver] == rank != holder) or giver in front or taker in front
            if helps and giver != taker and count > 1:
                yield [n + (stage == taker) - (stage == giver) for stage, n in enumerate(counts)]
