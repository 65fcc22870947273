"""Every private name of torch that Fivefold uses, in one place; a test fails when torch changes one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.multiprocessing.reductions import StorageWeakRef as StorageReference


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, in few kernels, in at least fp32."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return list(torch._foreach_norm(tensors, 2, dtype=dtype))


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by `factor`, in place, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def foreach_add_(tensors: list[Tensor], summand: Tensor) -> None:
    """Add `summand`, a single number, to each tensor, in place, in few kernels."""
    torch._foreach_add_(tensors, [summand] * len(tensors))  # given alone it would be read by the host


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has fast matrix products in `dtype`; many have no bf16 or fp16 instructions."""
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


def local_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Where this rank's shard starts in the global tensor, in each dimension, whatever the placements."""
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)


def divides_in_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's kernel reads `grad_scale` and `found_inf`, as torch.amp.GradScaler sets them."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """q (b, h, n, e), k and v (b, g, m, e), bias (b or 1, h or 1, n, m) -> output like q, log-sum-exp (b, h, n).

    On a CPU. A row that is -inf throughout gives output 0 and log-sum-exp 0. None of the sizes may be 0.
    """
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operation(q, k, v, 0.0, causal, attn_mask=bias)


def cpu_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the output and log-sum-exp over these keys or over more than these."""
    operation = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operation(dout, q, k, v, out, lse, 0.0, causal, attn_mask=bias)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """q (b, h, n, e), k and v (b, g, m, e) -> output like q, log-sum-exp (b, h, n); causal only with n = m."""
    operation = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = operation(q, k, v, None, True, 0.0, causal)[:2]
    return out, lse.view(q.shape[:-1])


def cudnn_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the output and log-sum-exp over these keys or over more than these."""
    operation = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    unread = torch.empty((), dtype=torch.int64, device=q.device)  # dropout's seed and offset
    lse = lse.contiguous().unsqueeze(-1)
    return operation(dout, q, k, v, out, lse, unread, unread, None, None, None, q.shape[2], k.shape[2], 0.0, causal)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """As `cudnn_attention`, by FlashAttention, whose head sizes are multiples of 8: others are filled up with zeros."""
    operation = torch.ops.aten._scaled_dot_product_flash_attention
    size = q.shape[-1]
    q, k, v = (F.pad(x, (0, -size % 8)) for x in (q, k, v))
    out, lse = operation(q, k, v, 0.0, causal, scale=size**-0.5)[:2]
    return out[..., :size], lse


def flash_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the output and log-sum-exp over these keys or over more than these."""
    operation = torch.ops.aten._scaled_dot_product_flash_attention_backward
    size, lengths = q.shape[-1], (q.shape[2], k.shape[2])
    dout, q, k, v, out = (F.pad(x, (0, -size % 8)) for x in (dout, q, k, v, out))
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)  # dropout's random state
    dq, dk, dv = operation(
        dout, q, k, v, out, lse.contiguous(), None, None, *lengths, 0.0, causal, unread, unread, scale=size**-0.5
    )
    return dq[..., :size], dk[..., :size], dv[..., :size]


def storage_reference(tensor: Tensor) -> StorageReference:
    """Names the tensor's memory: equal, and of one hash, for tensors that share it, and never for a later one's.

    It does not keep the memory.
    """
    return StorageReference(tensor.untyped_storage())


def view_base(tensor: Tensor) -> Tensor | None:
    """The tensor that autograd knows this one as a view of; None if it is no view."""
    return tensor._base


def abort_groups() -> None:
    """Leave all process groups at once, whatever is under way in them. Of NCCL's only."""
    dist.distributed_c10d._abort_process_group()


@contextmanager
def pretended_rank(rank: int, world: int) -> Iterator[None]:
    """Be `rank` of `world` ranks that do not exist: groups and meshes are made, collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def without_memory() -> Iterator[None]:
    """Tensors made inside have shape, format and device, and no memory; what is computed from them has neither.

    FSDP compares addresses when its parameters are replaced, and torch 2.11 warns that such tensors have none.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor", category=UserWarning)
        yield


def dtensor_over(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, strides: tuple[int, ...]
) -> DTensor:
    """A DTensor over the memory of `local`, wherever that is: `DTensor.from_local` moves it to the mesh's device."""
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, strides, local.dtype))
    return DTensor(local, spec, requires_grad=False)


class UnshardedParameter:
    """A parameter of an FSDP unit while it is gathered, and its gradient before the reduction.

    `tensor` is what the module computes with, the same object each time that it is gathered.
    """

    def __init__(self, managed: Any) -> None:
        self._managed = managed

    @property
    def tensor(self) -> Tensor:
        """What the module computes with."""
        return self._managed.unsharded_param

    @property
    def sharded(self) -> torch.nn.Parameter:
        """This rank's piece of it, which the optimizer updates."""
        return self._managed.sharded_param

    @property
    def gradient(self) -> Tensor | None:
        """What was added up so far, in the format in which it is reduced."""
        return self._managed.unsharded_accumulated_grad

    @gradient.setter
    def gradient(self, total: Tensor) -> None:
        self._managed.unsharded_accumulated_grad = total


def unsharded_parameters(unit: FSDPModule) -> list[UnshardedParameter]:
    """Those of the unit itself, without the units inside it; none before it was gathered for the first time."""
    managed = (each for group in _parameter_groups(unit) for each in group.fsdp_params)
    return [UnshardedParameter(each) for each in managed if hasattr(each, "_unsharded_param")]


def reduce_gradients(unit: FSDPModule) -> None:
    """Start what the unit does after the last backward of its parameters: reduce, and drop what was gathered.

    It must be told before (`set_requires_gradient_sync`) that it reduces.
    """
    for group in _parameter_groups(unit):
        group.post_backward()


def finish_backward(root: FSDPModule) -> None:
    """End a step's backward that autograd did not end: later work on the current stream waits for the reductions."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    """Torch 2.13 has a list, torch 2.11 one or none."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
