"""What tensor parallelism does beside its layers."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fivefold.parallel import tensor
from fivefold.parallel.axis import Axis
from fivefold.parallel.tensor import piece, sum_partial


@dataclass(frozen=True)
class Thrice(Axis):
    """Three ranks that hold the same, one of which is real."""

    summed: list[Tensor] = field(default_factory=list)

    def sum_(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        self.summed.append(x)
        return x.mul_(3)


def test_partial_gradients_are_summed_in_fp32_and_the_others_left_alone() -> None:
    gradients = [torch.full((5,), 1.0078125, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.bfloat16)]
    gradients += [torch.full((1, 3), -2.0, dtype=torch.bfloat16)]
    sum_partial([SimpleNamespace(partial=partial) for partial in (True, False, True)], gradients, Thrice())  # type: ignore[misc]
    assert gradients[0].tolist() == [torch.tensor(3.0234375).bfloat16().item()] * 5
    assert gradients[1].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert gradients[2].tolist() == [[-6.0, -6.0, -6.0]]


def test_long_partial_gradients_are_summed_where_they_are_and_short_ones_together(monkeypatch) -> None:
    monkeypatch.setattr(tensor, "JOINED", 6)
    sizes = (7, 2, 4, 1, 6, 9)
    gradients = [torch.full((size,), float(size)) for size in sizes]
    counted = Thrice()
    sum_partial([SimpleNamespace(partial=True)] * len(sizes), gradients, counted)  # type: ignore[misc]
    assert [gradient.tolist() for gradient in gradients] == [[3.0 * size] * size for size in sizes]
    assert [len(x) for x in counted.summed] == [7, 6, 1, 6, 9]
    in_place = {x.data_ptr() for x in counted.summed} & {gradient.data_ptr() for gradient in gradients}
    assert in_place == {gradients[place].data_ptr() for place in (0, 3, 4, 5)}


@pytest.mark.parametrize(("size", "ranks"), [(1003, 2), (1003, 4), (13, 4), (5, 4), (3, 4), (12, 3)])
def test_pieces_are_those_of_torch_chunk(size: int, ranks: int) -> None:
    chunks = list(torch.arange(size).chunk(ranks))
    pieces = [list(piece(size, Axis(ranks, rank))) for rank in range(ranks)]
    assert [each for each in pieces if each] == [chunk.tolist() for chunk in chunks]
    assert [row for each in pieces for row in each] == list(range(size))
