"""An optimizer in CPU memory updates as one on the device does, bit for bit where both compute on a CPU."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.config.run import Batch, Data, Model, Optim, Parallel, Precision, Run, Source
from fivefold.data.loader import Microbatch, Step
from fivefold.optim import optimizer as optimizer_module
from fivefold.optim.offload import OffloadedOptimizer, optimizer_for
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.mesh import Mesh, mesh_of
from fivefold.parallel.state import sharded_parameters
from fivefold.pipeline.execute import Pipeline
from fivefold.train.build import build_pipeline, load_initial_weights
from fivefold.train.step import train_step

MODEL = Model(layers=2, hidden=16, heads=2, ffn=24, vocab=97, bias=True, norm="layernorm", tied=True, init_std=0.1)
OPTIM = Optim(betas=(0.8, 0.9), eps=1e-5, weight_decay=0.3)
PLAIN, OPTIMIZER, BOTH = (), ("optimizer",), ("optimizer", "parameters")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """This process alone."""
    backend = "gloo" if request.param == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield mesh_of(Parallel(), torch.device("cpu" if request.param == "cpu" else "cuda:0"))
    dist.destroy_process_group()


def open_model(
    mesh: Mesh, offload: tuple[str, ...], compute: str = "fp32", zero: int = 1, **optim: Any
) -> tuple[Pipeline, ShardedOptimizer]:
    run = Run(
        name="offloaded",
        steps=1,
        model=MODEL,
        data=Data(train=[Source(path=Path("none"))]),
        batch=Batch(global_size=6, micro_size=3),
        parallel=Parallel(dp=1, zero=zero),  # type: ignore[arg-type]
        precision=Precision(compute=compute),  # type: ignore[arg-type]
        offload=list(offload),  # type: ignore[arg-type]
    )
    pipeline = build_pipeline(run, mesh)
    parameters = sharded_parameters(pipeline.stages, mesh)
    optimizer = optimizer_for(parameters, OPTIM.model_copy(update=optim), offload, mesh.pp)
    load_initial_weights(parameters, {}, run, lambda *_: None)
    return pipeline, optimizer


def open_optimizer(mesh: Mesh, offload: tuple[str, ...], compute: str = "fp32", **optim: Any) -> ShardedOptimizer:
    return open_model(mesh, offload, compute, **optim)[1]


def steps(optimizer: ShardedOptimizer, numbers: range) -> None:
    """Steps with random gradients; in step 2 one of them is infinite, in step 4 none is large enough to be clipped."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        gradients = []
        for parameter in optimizer.parameters.values():
            gradient = torch.randn(parameter.local.shape, generator=generator, dtype=torch.float64)
            gradients.append(gradient.to(parameter.local))
        if number == 2:
            gradients[3].view(-1)[1] = math.inf
        norm = torch.stack([gradient.double().norm() for gradient in gradients]).norm()
        clip = 1e9 if number == 4 else 0.5
        optimizer.step(gradients, 1e-2 / (1 + number), norm.to(optimizer_device(optimizer)), clip)


def optimizer_device(optimizer: ShardedOptimizer) -> torch.device:
    """Where the gradient norm is."""
    return torch.device(next(iter(optimizer.parameters.values())).mesh.device_type)


def everything(optimizer: ShardedOptimizer) -> dict[str, Tensor]:
    """Weights on the device, and state, copied."""
    weights = {f"model.{name}": p.local.cpu().clone() for name, p in optimizer.parameters.items()}
    state = {name: getattr(value, "to_local", lambda v=value: v)() for name, value in optimizer.state().items()}
    return weights | {f"optim.{name}": value.cpu().clone() for name, value in state.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], exact: bool) -> None:
    assert found.keys() == expected.keys()
    assert len(found) > 3 * len([name for name in found if name.startswith("model.")])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-5, msg=name)


@pytest.mark.parametrize("offload", [OPTIMIZER, BOTH], ids=str)
@pytest.mark.parametrize("compute", ["fp64", "fp32", "bf16"])
def test_weights_and_moments_are_those_of_the_run_without_offload(mesh, offload, compute) -> None:
    found, expected = (open_optimizer(mesh, each, compute) for each in (offload, PLAIN))
    for optimizer in (found, expected):
        steps(optimizer, range(6))
    assert_same(everything(found), everything(expected), exact=mesh.device.type == "cpu")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_steps_of_a_model_with_two_microbatches(mesh, zero) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 97, (2, 3, 17), generator=generator)
    microbatches = [Microbatch(rows[:, :-1], rows[:, 1:], None, False) for rows in tokens]
    batch = Step(microbatches, tokens[:, :, 1:].numel(), 0, 6)
    found = {}
    for offload in (PLAIN, OPTIMIZER, BOTH, (*BOTH, "activations")):
        pipeline, optimizer = open_model(mesh, offload, zero=zero)
        losses = [train_step(pipeline, batch, optimizer, mesh, lr=0.01, clip=0.5).loss for _ in range(3)]
        found[offload] = {"losses": torch.stack(losses).cpu()} | everything(optimizer)
    assert found[PLAIN]["losses"].diff().abs().min() > 1e-3
    for offload in (OPTIMIZER, BOTH, (*BOTH, "activations")):
        assert_same(found[offload], found[PLAIN], exact=mesh.device.type == "cpu")


def test_a_gradient_that_is_not_finite_changes_nothing(mesh) -> None:
    optimizer = open_optimizer(mesh, OPTIMIZER)
    steps(optimizer, range(2))
    before = everything(optimizer)
    steps(optimizer, range(2, 3))
    assert_same(everything(optimizer), before, exact=True)


@pytest.mark.parametrize("offload", [OPTIMIZER, BOTH], ids=str)
def test_what_is_updated_is_in_cpu_memory_and_pinned_for_a_gpu(mesh, offload) -> None:
    optimizer = open_optimizer(mesh, offload)
    steps(optimizer, range(1))
    on_gpu = mesh.device.type == "cuda"
    for name, local in optimizer.local.items():
        assert local.device.type == "cpu"
        assert local.is_pinned() == on_gpu
        assert {value.device.type for value in optimizer.inner[name].state[local].values()} == {"cpu"}
        apart = local.data_ptr() != optimizer.parameters[name].local.data_ptr()
        assert apart == (offload == OPTIMIZER)
        assert optimizer.parameters[name].local.is_cuda == (on_gpu and offload == OPTIMIZER)


@pytest.mark.parametrize(("saved", "loaded"), [(OPTIMIZER, PLAIN), (PLAIN, OPTIMIZER), (BOTH, OPTIMIZER)], ids=str)
def test_what_one_saves_the_other_goes_on_with(mesh, saved, loaded) -> None:
    first, second = open_optimizer(mesh, saved), open_optimizer(mesh, loaded)
    steps(first, range(2))
    steps(second, range(3, 5))  # other weights and moments, which loading must replace
    state = second.materialize()
    weights = {name: p.whole for name, p in second.parameters.items()}
    for name, value in everything(first).items():
        kind, _, key = name.partition(".")
        target = (weights if kind == "model" else state)[key]
        getattr(target, "to_local", lambda v=target: v)().copy_(value)
    for optimizer in (first, second):
        steps(optimizer, range(3, 6))
    assert_same(everything(second), everything(first), exact=mesh.device.type == "cpu")


def test_an_optimizer_of_ones_own_that_counts_its_steps_in_a_group(mesh, monkeypatch) -> None:
    """Each parameter is updated by itself: a count that all of them share would be wrong."""

    class Decaying(torch.optim.Optimizer):
        def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
            super().__init__(groups, {"lr": lr, "count": 0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["count"] += 1
                for parameter in group["params"]:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.mul_(0.5).add_(parameter.grad)
                    parameter.sub_(mean, alpha=group["lr"] / group["count"])

    factory = {"decaying": lambda groups, optim: Decaying(groups, optim.lr)}
    monkeypatch.setattr(optimizer_module, "OPTIMIZERS", factory)
    found, expected = (open_optimizer(mesh, each, name="decaying") for each in (OPTIMIZER, PLAIN))
    for optimizer in (found, expected):
        steps(optimizer, range(6))
    weights = {name: p.local for name, p in expected.parameters.items()}
    for name, parameter in found.parameters.items():
        torch.testing.assert_close(parameter.local, weights[name], rtol=1e-6, atol=1e-8)


def test_gradients_need_the_room_of_two_in_cpu_memory(mesh) -> None:
    optimizer = open_optimizer(mesh, OPTIMIZER)
    assert isinstance(optimizer, OffloadedOptimizer)
    largest = max(p.local.nbytes for p in optimizer.parameters.values())
    assert [len(memory) for memory in optimizer._arrivals] == [largest, largest]


@pytest.mark.gpu
def test_on_a_gpu_only_weights_and_gradients_are_left() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = mesh_of(Parallel(), torch.device("cuda:0"))
        used = {}
        for offload in (PLAIN, OPTIMIZER, BOTH):
            gc.collect()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            optimizer = open_optimizer(mesh, offload)
            steps(optimizer, range(3))
            torch.cuda.synchronize()
            used[offload] = torch.cuda.memory_allocated() - before
            weights = sum(p.local.nbytes for p in optimizer.parameters.values())
            del optimizer
        assert used[PLAIN] - used[OPTIMIZER] >= 2 * weights
        assert used[OPTIMIZER] - used[BOTH] >= weights
    finally:
        dist.destroy_process_group()
