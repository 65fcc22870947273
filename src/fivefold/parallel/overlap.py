"""Matrix products beside the transfer of their rows: what column and row layers compute with several ranks of tp.

A product whose input is gathered begins with the rows that the rank has already; a product whose output is added up
over the ranks is made in pieces on a GPU, each of which travels while the next is made.
"""

# t tokens of this rank  T tokens of all ranks of tp = t x tp  i and o the inner and outer width of a product

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fivefold.kernels.linear import multiply
from fivefold.parallel.axis import Axis, Pending

SCATTER_PIECES = {"cpu": 1, "cuda": 2}
"""Pieces of a product whose sum over ranks is wanted: more hide more of the transfer, fewer keep the products large."""


def gather_multiply(x_ti: Tensor, right_io: Tensor, tp: Axis) -> tuple[Tensor, Tensor]:
    """The product (T, o) of all ranks' rows, and the gathered rows (T, i)."""
    pending = tp.start_gather(x_ti)
    rows = len(x_ti)
    y_To = x_ti.new_empty(tp.size * rows, right_io.shape[1])
    mine = slice(tp.rank * rows, (tp.rank + 1) * rows)
    multiply(x_ti, right_io, out=y_To[mine])
    x_Ti = pending.wait()
    for others in (slice(0, mine.start), slice(mine.stop, len(y_To))):
        if others.start < others.stop:
            multiply(x_Ti[others], right_io, out=y_To[others])
    return y_To, x_Ti


@dataclass(frozen=True)
class Pieces:
    """A sum over ranks that arrives in pieces."""

    total: Tensor
    pending: list[Pending]

    def wait(self) -> Tensor:
        """The sum, once all of it is there."""
        for piece in self.pending:
            piece.wait()
        return self.total


def start_multiply_scatter(x_Ti: Tensor, right_io: Tensor, tp: Axis) -> Pieces:
    """This rank's rows (t, o) of the sum over the ranks of x @ right, which is (T, o)."""
    rows, width = len(x_Ti) // tp.size, right_io.shape[1]
    y_to = x_Ti.new_empty(rows, width)
    x_rti = x_Ti.view(tp.size, rows, -1)
    pending = []
    for part in y_to.tensor_split(min(SCATTER_PIECES[x_Ti.device.type], rows)):
        first = part.storage_offset() // width if width else 0
        partial_rpo = x_Ti.new_empty(tp.size, len(part), width)
        for rank in range(tp.size):
            multiply(x_rti[rank, first : first + len(part)], right_io, out=partial_rpo[rank])
        pending.append(tp.start_reduce_scatter(partial_rpo.flatten(0, 1), out=part))
    return Pieces(y_to, pending)
