"""Each private name of torch still does what `fivefold._torch` takes it for: one test a function."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import fivefold._torch as names


def test_every_function_of_the_file_has_its_test_here() -> None:
    members = inspect.getmembers(names, inspect.isfunction)
    functions = {name for name, each in members if each.__module__ == names.__name__ and not name.startswith("_")}
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


def test_foreach_add_adds_a_number_in_place() -> None:
    tensors = [torch.zeros(()), torch.full((), 2.0)]
    kept = list(tensors)
    names.foreach_add_(tensors, torch.tensor(0.5))
    assert all(before is after for before, after in zip(kept, tensors, strict=True))
    assert [float(tensor) for tensor in tensors] == [0.5, 2.5]


def test_cpu_multiplies_answers_for_every_format() -> None:
    assert names.cpu_multiplies(torch.float32) is True
    assert names.cpu_multiplies(torch.float64) is True
    assert isinstance(names.cpu_multiplies(torch.bfloat16), bool)
    assert isinstance(names.cpu_multiplies(torch.float16), bool)


def test_local_offsets_say_where_the_shard_of_a_rank_begins() -> None:
    with names.pretended_rank(2, 4):
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(35.0).view(5, 7)
        tensor = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0), Shard(1)], shape=(5, 7), stride=(7, 1))
        assert names.local_offsets(tensor) == (3, 0)
        assert torch.equal(whole[3:5, 0:4], whole.chunk(2, 0)[1].chunk(2, 1)[0])


def test_a_dtensor_over_cpu_memory_leaves_it_there_though_its_mesh_is_of_gpus() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        mesh = DeviceMesh("cuda", [[0, 1], [2, 3]])
        local = torch.arange(8.0).view(2, 4)
        whole = names.dtensor_over(local, mesh, (Shard(0), Shard(1)), torch.Size((5, 7)), (7, 1))
        assert whole.shape == (5, 7)
        assert whole.to_local().data_ptr() == local.data_ptr()
        assert whole.device.type == "cpu"
        assert not whole.requires_grad
        assert names.local_offsets(whole) == (3, 0)
        whole.to_local()[0, 0] = -1.0
        assert local[0, 0] == -1.0
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


def test_a_storage_reference_is_that_of_its_memory_and_of_none_that_comes_after() -> None:
    tensor = torch.zeros(1000)
    reference = names.storage_reference(tensor)
    assert reference == names.storage_reference(tensor[10:].view(30, 33).T)
    assert reference == names.storage_reference(tensor.detach())
    assert hash(reference) == hash(names.storage_reference(tensor))
    assert reference != names.storage_reference(tensor.clone())
    del tensor
    assert reference.expired()
    assert all(names.storage_reference(torch.zeros(1000)) != reference for _ in range(100))


def test_view_base_is_the_parameter_that_a_view_shows() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    assert names.view_base(weight.t()) is weight
    assert names.view_base(weight[1:].t()) is weight
    assert names.view_base(weight) is None
    assert names.view_base(weight * 2) is None


def attention_inputs(queries: int, keys: int, size: int = 12, **kind: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v with 6 and 2 heads, and the gradient of the output."""
    shapes = ((6, queries), (2, keys), (2, keys), (6, queries))
    q, k, v, dout = (torch.randn(3, *shape, size, **kind) for shape in shapes)
    return q, k, v, dout


def attention_in_two_parts(attention: Any, attention_backward: Any, **kind: Any) -> None:
    """Causal over the first keys, whole over others: outputs join by log-sum-exp, gradients follow from the whole."""
    (q, k, v, dout), (_, k2, v2, _) = attention_inputs(16, 16, **kind), attention_inputs(16, 24, **kind)
    (out, lse), (out2, lse2) = attention(q, k, v, causal=True), attention(q, k2, v2, causal=False)
    assert lse.shape == lse2.shape == (3, 6, 16)
    whole_lse = torch.logaddexp(lse, lse2)
    whole = (out * (lse - whole_lse).exp()[..., None] + out2 * (lse2 - whole_lse).exp()[..., None]).to(q.dtype)
    first = attention_backward(dout, q, k, v, whole, whole_lse, causal=True)
    second = attention_backward(dout, q, k2, v2, whole, whole_lse, causal=False)
    leaves = [x.double().requires_grad_() for x in (q, torch.cat((k, k2), 2), torch.cat((v, v2), 2))]
    seen = torch.cat((torch.ones(16, 16).tril(), torch.ones(16, 24)), 1).bool().to(q.device)
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=seen, enable_gqa=True)
    gradients = torch.autograd.grad(expected, leaves, dout.double())
    found = (whole, first[0] + second[0], *(torch.cat(pair, 2) for pair in zip(first[1:], second[1:], strict=True)))
    for ours, theirs in zip(found, (expected, *gradients), strict=True):
        assert (ours - theirs).norm() / theirs.norm() < (1e-14 if q.dtype == torch.float64 else 8e-3)


def test_cpu_attention_gives_the_log_sum_exp_and_takes_the_whole_s_in_backward() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return names.cpu_attention(q, k, v, causal, bias=None)

    def backward(*tensors: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        return names.cpu_attention_backward(*tensors, causal, bias=None)

    attention_in_two_parts(attention, backward, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cpu_attention_gives_zeros_for_a_row_that_sees_nothing(dtype: torch.dtype) -> None:
    q, k, v, dout = attention_inputs(5, 7, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    bias = torch.zeros(3, 1, 5, 7, dtype=wide)
    bias[:, :, 2] = float("-inf")
    out, lse = names.cpu_attention(q, k, v, False, bias)
    assert out.dtype == dtype
    assert lse.dtype == wide
    assert not out[:, :, 2].any()
    assert not lse[:, :, 2].any()
    dq, dk, dv = names.cpu_attention_backward(dout, q, k, v, out, lse, False, bias)
    assert not dq[:, :, 2].any()
    assert all(gradient.isfinite().all() for gradient in (dq, dk, dv))


def test_gpu_attention_takes_grouped_queries_and_gives_a_log_sum_exp_a_query() -> None:
    q, k, v, dout = attention_inputs(16, 24, dtype=torch.bfloat16, device="meta")
    for attention, backward in (
        (names.cudnn_attention, names.cudnn_attention_backward),
        (names.flash_attention, names.flash_attention_backward),
    ):
        out, lse = attention(q, k, v, causal=False)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
        shapes = [gradient.shape for gradient in backward(dout, q, k, v, out, lse, causal=False)]
        assert shapes == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
def test_gpu_attention_gives_the_log_sum_exp_and_takes_the_whole_s_in_backward() -> None:
    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    attention_in_two_parts(names.cudnn_attention, names.cudnn_attention_backward, size=16, **kind)
    attention_in_two_parts(names.flash_attention, names.flash_attention_backward, size=12, **kind)


def test_a_pretended_rank_has_groups_and_leaves_none_behind() -> None:
    with names.pretended_rank(12345, 16384):
        mesh = init_device_mesh("cpu", (2048, 8))
        assert (dist.get_rank(), dist.get_world_size()) == (12345, 16384)
        assert (mesh.get_local_rank(0), mesh.get_local_rank(1)) == (1543, 1)
        dist.all_reduce(torch.ones(3), group=mesh.get_group(1))
    assert not dist.is_initialized()


def test_without_memory_a_tensor_of_a_terabyte_is_made_and_updated() -> None:
    with names.without_memory():
        weight = torch.nn.Parameter(torch.empty(2**20, 2**18))
        weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        optimizer.step()
    assert optimizer.state[weight]["exp_avg"].shape == (2**20, 2**18)
    assert optimizer.state[weight]["exp_avg"].device.type == "cpu"


def test_gradients_that_were_computed_apart_are_added_to_those_of_fsdp_and_reduced_by_hand() -> None:
    """A unit inside a root; one microbatch's gradient comes from autograd, another's from elsewhere."""
    with alone():
        mesh = init_device_mesh("cpu", (1,))
        model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 1, bias=False)).double()
        weights = [layer.weight.detach().clone() for layer in model]
        for unit in (model[0], model):
            fully_shard(unit, mesh=mesh)
        model.set_requires_gradient_sync(False)
        model.set_is_last_backward(False)
        x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        model(x).sum().backward()
        units = [model[0], model]
        owned = [names.unsharded_parameters(unit) for unit in units]
        assert [[tuple(each.tensor.shape) for each in of_unit] for of_unit in owned] == [[(2, 2)], [(1, 2)]]
        model.set_requires_gradient_sync(True)
        model.set_is_last_backward(True)
        for number, (each,) in enumerate(owned):
            assert each.gradient is None or each.gradient.shape == each.tensor.shape
            each.gradient = torch.full_like(each.tensor, 10.0 + number)
        names.reduce_gradients(units[0])
        names.finish_backward(model)
        found = [layer.weight.grad.to_local() for layer in model]
    torch.testing.assert_close(found[0], 10 + weights[1].T * x)
    torch.testing.assert_close(found[1], 11 + x @ weights[0].T)


def test_a_unit_without_parameters_of_its_own_has_nothing_to_reduce() -> None:
    with alone():
        mesh = init_device_mesh("cpu", (1,))
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        for unit in (model[0], model):
            fully_shard(unit, mesh=mesh)
        model(torch.ones(1, 2)).sum().backward()
        assert names.unsharded_parameters(model) == []
        names.reduce_gradients(model)


@contextmanager
def alone() -> Iterator[None]:
    """A group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_groups_are_left_at_once() -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1, device="cuda"))
    names.abort_groups()
    assert not dist.is_initialized()
