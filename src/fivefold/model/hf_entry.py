"""Which tensors of a file make up one tensor of ours: as rows that interleave, as one tensor an expert, or fused.

Each kind can give any box of our tensor (a range of every dimension) and reads no more for it than a box of each of
theirs, so that a rank which holds a few experts, or a few of their columns, reads those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, cat, stack

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""Of each dimension: the first element and the one behind the last."""
Read = Callable[[str, Box], Tensor]
"""Gives a box of a tensor of the file, by its name."""


class AnyEntry(Protocol):
    """One parameter or buffer of ours, and where it stands in the files."""

    @property
    def ours(self) -> str:
        """Its name."""

    @property
    def shape(self) -> Shape:
        """Its whole shape."""

    @property
    def theirs(self) -> Mapping[str, Shape]:
        """Names in the file and their shapes, in the order in which `split` gives them."""

    @property
    def copies(self) -> Sequence[str]:
        """Names of further tensors of the file that are equal to the one in `theirs`; a file may leave them out."""

    @property
    def exact(self) -> bool:
        """Whether an export writes it in fp32 whatever format it writes the rest in."""

    def split(self, ours: Tensor) -> Iterator[Tensor]:
        """From our whole tensor to theirs, one at a time."""

    def read(self, box: Box, read: Read) -> Tensor:
        """A box of our tensor."""


@dataclass(frozen=True)
class Entry:
    """A tensor of ours whose rows are those of one or several tensors of the file, which take turns.

    Ours is `groups` equal groups of rows, and in each group stand the next rows of every one of theirs. One of theirs
    alone is the tensor itself; gate and up alternate, a group a row of each; query, key and value stand together by
    key/value head. So a range of our rows needs a range of rows of each of theirs, and a rank reads no more.
    """

    ours: str
    theirs: Mapping[str, Shape]
    """Names in the file and their shapes, in the order in which they stand in a group."""
    groups: int
    order: Sequence[int] | None = None
    """Which row of a group of theirs each row of ours is; None for the same."""
    copies: Sequence[str] = ()
    """Further names of the file for the same tensor, which a file may leave out and an export writes."""
    exact: bool = False
    """Whether an export writes it in fp32 whatever format it writes the rest in."""

    @property
    def rows(self) -> int:
        """Rows of our whole tensor."""
        return sum(shape[0] for shape in self.theirs.values())

    @property
    def shape(self) -> Shape:
        """Our whole tensor's."""
        return (self.rows, *next(iter(self.theirs.values()))[1:])

    def split(self, ours: Tensor) -> Iterator[Tensor]:
        """From our whole tensor to theirs."""
        shapes = self.theirs.values()
        grouped = ours.reshape(self.groups, -1, *self.shape[1:])
        if self.order is not None:
            grouped = grouped[:, _inverse(self.order)]
        parts = grouped.split([shape[0] // self.groups for shape in shapes], dim=1)
        return (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """From theirs, or from those of their rows that belong to some of the groups, to ours."""
        if len(parts) == 1 and self.order is None:
            return parts[0]
        per_group = [shape[0] // self.groups for shape in self.theirs.values()]
        grouped = cat(
            [part.reshape(-1, rows, *part.shape[1:]) for part, rows in zip(parts, per_group, strict=True)], dim=1
        )
        return (grouped if self.order is None else grouped[:, self.order]).flatten(0, 1)

    def read(self, box: Box, read: Read) -> Tensor:
        """A box of ours, from whole groups of the rows of theirs."""
        (start, stop), *rest = box
        size = self.rows // self.groups
        first, last = start // size, -(-stop // size)
        per_group = {name: shape[0] // self.groups for name, shape in self.theirs.items()}
        whole_groups = self.fuse([read(name, ((first * n, last * n), *rest)) for name, n in per_group.items()])
        return whole_groups[start - first * size : stop - first * size]


@dataclass(frozen=True)
class Stacked:
    """A tensor of ours that stacks the experts of a layer, of which the file holds tensors of their own."""

    ours: str
    experts: Sequence[Entry]
    """Of each expert, its tensors and how they make up our matrix."""
    copies: Sequence[str] = ()
    exact: bool = False

    @property
    def theirs(self) -> Mapping[str, Shape]:
        """Those of all experts, in order."""
        return {name: shape for expert in self.experts for name, shape in expert.theirs.items()}

    @property
    def shape(self) -> Shape:
        """Experts, rows, columns."""
        return (len(self.experts), *self.experts[0].shape)

    def split(self, ours: Tensor) -> Iterator[Tensor]:
        """From our whole tensor to those of each expert in turn."""
        for expert, matrix in zip(self.experts, ours, strict=True):
            yield from expert.split(matrix)

    def read(self, box: Box, read: Read) -> Tensor:
        """A box of ours, from the tensors of its experts."""
        (first, last), *rest = box
        return stack([expert.read(tuple(rest), read) for expert in self.experts[first:last]])


@dataclass(frozen=True)
class Halves:
    """A tensor of ours (experts, 2 x rows, columns) whose rows alternate in each expert, while the file's stand in
    halves: first all gates, then all ups, as transformers 5 keeps them in memory and some files hold them."""

    ours: str
    name: str
    """The one tensor of the file."""
    shape: Shape
    """The same in both."""
    copies: Sequence[str] = ()
    exact: bool = False

    @property
    def theirs(self) -> Mapping[str, Shape]:
        """The one tensor."""
        return {self.name: self.shape}

    def split(self, ours: Tensor) -> Iterator[Tensor]:
        """From our whole tensor to theirs."""
        yield ours.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)

    def read(self, box: Box, read: Read) -> Tensor:
        """A box of ours, from a range of rows of either half."""
        experts, (start, stop), columns = box
        half = self.shape[1] // 2
        first, last = start // 2, -(-stop // 2)
        gate = read(self.name, (experts, (first, last), columns))
        up = read(self.name, (experts, (half + first, half + last), columns))
        return stack([gate, up], dim=2).flatten(1, 2)[:, start - 2 * first : stop - 2 * first]


def same(ours: str, theirs: str, shape: Shape) -> Entry:
    """A tensor that the file holds as it is."""
    return Entry(ours, {theirs: shape}, groups=shape[0])


def _inverse(order: Sequence[int]) -> list[int]:
    inverse = [0] * len(order)
    for ours, theirs in enumerate(order):
        inverse[theirs] = ours
    return inverse
