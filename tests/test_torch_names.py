"""Each private name of torch still does what `fivefold._torch` takes it for: one test a function."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import fivefold._torch as names


def test_every_function_of_the_file_has_its_test_here() -> None:
    functions = {name for name, _ in inspect.getmembers(names, inspect.isfunction) if _.__module__ == names.__name__}
    used = {node.attr for node in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(node, ast.Attribute)}
    assert functions - used == set()


def test_foreach_norm_is_the_2_norm_of_each_in_at_least_fp32() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.zeros(0), torch.full((2, 2), -1.0)]
    assert [float(norm) for norm in names.foreach_norm(tensors)] == [5.0, 0.0, 2.0]
    wide = torch.full((1000,), 0.01, dtype=torch.bfloat16)
    (norm,) = names.foreach_norm([wide])
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, wide.float().norm(), rtol=1e-6, atol=0)
    (exact,) = names.foreach_norm([torch.tensor([3e-200, 4e-200], dtype=torch.float64)])
    assert exact.dtype == torch.float64


def test_foreach_norm_keeps_infinities_and_nan() -> None:
    infinite, undefined = names.foreach_norm([torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, torch.nan])])
    assert infinite == torch.inf
    assert undefined.isnan()


def test_foreach_mul_multiplies_in_place_by_a_tensor() -> None:
    tensors = [torch.ones(3), torch.full((2, 2), 2.0), torch.zeros(0)]
    kept = list(tensors)
    names.foreach_mul_(tensors, torch.tensor(0.5))
    assert all(before is after for before, after in zip(kept, tensors, strict=True))
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.5], [1.0], []]


def test_cpu_multiplies_answers_for_every_format() -> None:
    assert names.cpu_multiplies(torch.float32) is True
    assert names.cpu_multiplies(torch.float64) is True
    assert isinstance(names.cpu_multiplies(torch.bfloat16), bool)
    assert isinstance(names.cpu_multiplies(torch.float16), bool)


def test_local_offsets_say_where_the_shard_of_a_rank_begins() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(35.0).view(5, 7)
        tensor = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0), Shard(1)], shape=(5, 7), stride=(7, 1))
        assert names.local_offsets(tensor) == (3, 0)
        assert torch.equal(whole[3:5, 0:4], whole.chunk(2, 0)[1].chunk(2, 1)[0])
    finally:
        dist.destroy_process_group()


def test_divides_in_kernel_is_true_where_the_kernel_divides_and_skips() -> None:
    def stepped(found_inf: float) -> float:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
        assert names.divides_in_kernel(optimizer)
        weight.grad = torch.full((1,), 8.0)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(16.0), torch.tensor(found_inf)
        optimizer.step()
        return float(weight.detach())

    assert stepped(0.0) == 0.5
    assert stepped(1.0) == 1.0
    assert not names.divides_in_kernel(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, foreach=False))


def test_a_skipped_step_leaves_weight_moments_and_step_count_of_adamw() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    kept: list[torch.Tensor] = []
    for found_inf in (0.0, 1.0):
        weight.grad = torch.ones(3)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found_inf)
        optimizer.step()
        state = optimizer.state[weight]
        now = [weight.detach().clone(), *(value.clone() for value in state.values())]
        if kept:
            assert all(torch.equal(before, after) for before, after in zip(kept, now, strict=True))
        kept = now
