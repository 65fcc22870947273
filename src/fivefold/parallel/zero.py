"""Data parallelism: ZeRO stages 0 to 3 through FSDP2, behind one function.

Splits parameters, gradients and optimizer state over the `shard` axis of the mesh, to which the ranks of cp belong.
Collectives: an all-gather of each block's weights before it is used, a reduce-scatter of its gradients after its
backward, and with replicas an all-reduce of the shards, once a step: inside a node first, then between nodes, if
`parallel.shard` x cp fills a node. Experts are spread over their own replicas instead. Mixed precision lives here too
(weights are kept in the master format, gathered in the compute format, gradients reduced in the reduce format), so a
model is wrapped even on one rank. Sources: Rajbhandari et al. 2020 (ZeRO), Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from fivefold.config.run import Precision
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.state import EXPERTS

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def master_dtype(precision: Precision) -> torch.dtype:
    """The format in which weights are kept."""
    if precision.master != "auto":
        return DTYPES[precision.master]
    return torch.float64 if precision.compute == "fp64" else torch.float32


def reduce_dtype(precision: Precision) -> torch.dtype:
    """The format in which gradients are accumulated and reduced."""
    return master_dtype(precision) if precision.reduce == "auto" else DTYPES[precision.reduce]


def shard_data_parallel(
    model: nn.Module, mesh: Mesh, stage: int, precision: Precision, offload_parameters: bool = False
) -> None:
    """Wrap `model` in place: each of its `layers` is a unit, so are an untied embedding and head, the rest is one.
    The experts of a layer are a unit of their own inside it.

    stage 0 replicates; 1 shards, gathers once and reduces once a step; 2 reduces each microbatch; 3 also gathers each
    time a block is used. Gradients come out as sums over ranks, not means: the loss is already divided by the step's
    number of labels. (One rank has nothing to divide, and dividing by 1 would read and write every gradient.)

    With `offload_parameters` the pieces live in CPU memory, where the caller must allocate them, and so do their
    gradients; a unit's travel to the device when it is gathered.
    """
    pieces = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda") if offload_parameters else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[precision.compute], reduce_dtype=reduce_dtype(precision))
    options = {"reshard_after_forward": stage == 3, "offload_policy": pieces}
    for experts in [part for part in model.modules() if hasattr(part, EXPERTS)]:
        _wrap_experts(experts, replicas(mesh.experts), mp_policy=replace(policy, cast_forward_inputs=False), **options)
    for part in _units(model):
        _wrap(part, replicas(mesh.dense), mp_policy=policy, **options)


def replicas(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that hold the same parameters, or pieces of them."""
    return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]


def _wrap(part: nn.Module, ranks: DeviceMesh, **options: Any) -> None:
    unit = fully_shard(part, mesh=ranks, **options)
    if ranks.size() > 1:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)


def _wrap_experts(experts: nn.Module, ranks: DeviceMesh, **options: Any) -> None:
    """Whole experts if their replicas share them out evenly, else parts of each one's width, else what comes of it.

    What they are given keeps its format: gates are more precise than the rows that they weigh.
    """
    shards = ranks.size(-1)
    dimensions: dict[nn.Parameter, int] = {experts.get_parameter(name): width for name, width in experts.widths.items()}  # type: ignore[union-attr,operator]
    whole = all(len(parameter) % shards == 0 for parameter in dimensions)
    even = all(parameter.shape[dimension] % shards == 0 for parameter, dimension in dimensions.items())
    by_width = even and not whole
    _wrap(
        experts, ranks, shard_placement_fn=lambda parameter: Shard(dimensions[parameter] if by_width else 0), **options
    )


def release_gathered(model: nn.Module) -> None:
    """Drop gathered weights that a forward without backward left behind."""
    for unit in sharded_units(model):
        unit.reshard()


def sharded_units(model: nn.Module) -> Iterator[FSDPModule]:
    """All parts of the model that are gathered and reduced as one."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _units(model: nn.Module) -> Iterator[nn.Module]:
    yield from model.layers.children()  # type: ignore[union-attr]
    yield from getattr(model, "mtp", nn.ModuleDict()).children()
    embedding, head = getattr(model, "embedding", None), getattr(model, "head", None)
    tied = embedding is not None and head is not None and not any(True for _ in head.parameters())
    yield from (part for part in (embedding, head) if part is not None and not tied)  # a tied weight is the root's
    yield model
