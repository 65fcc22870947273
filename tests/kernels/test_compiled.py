"""What is compiled on a GPU runs as it is written on a CPU."""

import pytest
import torch
from torch import Tensor

from fivefold.kernels.compiled import compiled_on_cuda


def test_nothing_is_compiled_for_a_cpu_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", fail)

    @compiled_on_cuda
    def double(x: Tensor) -> Tensor:
        return 2 * x

    assert double(torch.ones(2)).tolist() == [2, 2]
    assert double.__name__ == "double"
