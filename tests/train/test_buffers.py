"""State that is no parameter, such as a router's biases: in which format it is kept, and where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fivefold._torch import pretended_rank
from fivefold.config.run import Data, Model, Precision, Run, Source
from fivefold.model.family import Family
from fivefold.parallel.mesh import mesh_of
from fivefold.train.build import build_stages, empty_model

CPU, META = torch.device("cpu"), torch.device("meta")
MOE = {"experts": 2, "top_k": 1, "ffn": 4, "bias": True}
MODEL = Model(layers=1, hidden=8, heads=2, ffn=8, vocab=16, context=16, moe=MOE)  # type: ignore[arg-type]


def built(**fields: object) -> nn.Module:
    """The model of a run on one rank, whose device is not the CPU."""
    data = Data(train=[Source(path=Path("x"))], seq_len=8)
    run = Run(name="a", steps=1, **{"model": MODEL, "data": data} | fields)  # type: ignore[arg-type]
    with pretended_rank(0, 1):
        mesh = replace(mesh_of(run.parallel, CPU), device=META)
        return build_stages(run, mesh, (0,), pipelined=False)[0][0]


def biases(model: nn.Module) -> Iterator[Tensor]:
    return (buffer for name, buffer in model.named_buffers() if name.endswith(("router.bias", "router.load")))


def test_parameters_in_cpu_memory_leave_a_routers_state_where_it_computes() -> None:
    model = built(offload=["optimizer", "parameters"])
    assert {parameter.device for parameter in model.parameters()} == {CPU}
    assert [buffer.device for buffer in biases(model)] == [META] * 2


@pytest.mark.parametrize("master", ["bf16", "fp32"])
def test_a_routers_state_is_in_fp32_beside_weights_of_any_format(master: str) -> None:
    trained = built(precision=Precision(master=master, reduce=master))  # type: ignore[arg-type]
    used = empty_model(MODEL, torch.bfloat16, CPU)
    assert {parameter.dtype for parameter in used.parameters()} == {torch.bfloat16}
    for model in (trained, used):
        assert [buffer.dtype for buffer in biases(model)] == [torch.float32] * 2


class Counting(nn.Module):
    """A model of another package, with a buffer of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.register_buffer("places", torch.arange(4))


def test_whole_numbers_stay_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Family("own", lambda model, part: Counting(), lambda parameters, model, seed: None)
    monkeypatch.setattr("fivefold.train.build.family", lambda model: own)
    assert built().get_buffer("places").dtype == torch.int64
    assert empty_model(MODEL, torch.bfloat16, CPU).get_buffer("places").dtype == torch.int64
