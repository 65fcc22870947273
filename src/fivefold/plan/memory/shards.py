"""What one rank has of each parameter: what tp or ep leaves of it, and its piece of that under ZeRO. In elements.

The pieces are those of the rank that has most: a dimension that the shards do not divide leaves the last ones less, or
nothing. Equal to what training builds (`--build-rank`), which a test holds. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod

from fivefold.config.run import Run
from fivefold.model.spec import EXPERTS, Shapes
from fivefold.pipeline.layer_bytes import ROW_LAYERS, WHOLE

COLUMN_BIASES = ("qkv.bias", "gate_up.bias", "up.bias")
"""The biases that tp cuts with their matrices' rows."""


@dataclass(frozen=True)
class Held:
    """Elements of some parameters on one rank; of dense ones and of routed experts, whose replicas are others."""

    dense: float = 0.0
    experts: float = 0.0
    dense_piece: float = 0.0
    experts_piece: float = 0.0
    copies: float = 0.0
    """Of `piece`, what is a copy of another stage's and has no moments: a tied embedding in the head."""
    tensors: int = 0
    """Parameters by name, without copies: the optimizer counts the steps of each."""

    def __add__(self, other: Held) -> Held:
        return Held(
            self.dense + other.dense,
            self.experts + other.experts,
            self.dense_piece + other.dense_piece,
            self.experts_piece + other.experts_piece,
            self.copies + other.copies,
            self.tensors + other.tensors,
        )

    def __sub__(self, other: Held) -> Held:
        return Held(
            self.dense - other.dense,
            self.experts - other.experts,
            self.dense_piece - other.dense_piece,
            self.experts_piece - other.experts_piece,
            self.copies - other.copies,
            self.tensors - other.tensors,
        )

    @property
    def whole(self) -> float:
        """What tp and ep leave."""
        return self.dense + self.experts

    @property
    def piece(self) -> float:
        """Of that, the rank's shard."""
        return self.dense_piece + self.experts_piece


NOTHING = Held()


class Parts:
    """The units of a stage in forward order, and sums over stretches of them."""

    def __init__(self, units: Sequence[Held], tied: bool = False) -> None:
        """`tied` if the last unit computes with the weight of the first."""
        self.units = tuple(units)
        self.tied = units[0] if tied else NOTHING
        self._sums = tuple(accumulate(units, initial=NOTHING))
        self.all = self._sums[-1]

    def before(self, unit: int) -> Held:
        """All units in front of this one."""
        return self._sums[min(unit, len(self.units))]

    def since(self, unit: int) -> Held:
        """This unit and all behind it."""
        return self.all - self.before(unit)

    def begun_before(self, unit: int) -> Held:
        """What is in front of this unit and has a gradient of the last one already, when this one's backward runs."""
        return self.tied if 0 < unit < len(self.units) else NOTHING

    def one(self, unit: int) -> Held:
        """This unit; nothing behind the last one."""
        return self.units[unit] if unit < len(self.units) else NOTHING


class Shards:
    """Cuts the parameters of a run whose ranks are known."""

    def __init__(self, run: Run) -> None:
        parallel = run.parallel
        assert parallel.dp != "auto", "the ranks are known"
        self._tp, self._ep = parallel.tp, parallel.ep
        ranks = parallel.dp * parallel.cp
        self.dense = 1 if parallel.zero == 0 else ranks // parallel.replicate
        """Shards of a dense parameter."""
        self.experts = 1 if parallel.zero == 0 else max(1, ranks * parallel.tp // parallel.ep)
        """Shards of an expert's parameter."""

    def of(self, shapes: Shapes) -> Held:
        """What a rank has of parameters of these whole shapes, by their names."""
        dense = [self._after_tp(name, shape) for name, shape in shapes.items() if EXPERTS not in name]
        experts = {n: (max(1, shape[0] // self._ep), *shape[1:]) for n, shape in shapes.items() if EXPERTS in n}
        whole = all(shape[0] % self.experts == 0 for shape in experts.values())
        return Held(
            dense=sum(map(prod, dense)),
            experts=sum(map(prod, experts.values())),
            dense_piece=sum(_piece(shape, 0, self.dense) for shape in dense),
            experts_piece=sum(self._expert_piece(name, shape, whole) for name, shape in experts.items()),
            tensors=len(shapes),
        )

    def _after_tp(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self._tp == 1 or name.endswith(WHOLE) or not (len(shape) == 2 or name.endswith(COLUMN_BIASES)):
            return shape
        cut = 1 if name.endswith(ROW_LAYERS) else 0
        return tuple(ceil(size / self._tp) if axis == cut else size for axis, size in enumerate(shape))

    def _expert_piece(self, name: str, shape: tuple[int, ...], whole: bool) -> float:
        """Whole experts if their replicas share them out evenly, else parts of each one's width (parallel/zero.py)."""
        width = 2 if name.endswith("down") else 1
        by_width = not whole and shape[width] % self.experts == 0
        return _piece(shape, width if by_width else 0, self.experts)


def _piece(shape: tuple[int, ...], axis: int, shards: int) -> float:
    return prod(ceil(size / shards) if place == axis else size for place, size in enumerate(shape))
