"""Data parallelism: ZeRO stages 0 to 3 through FSDP2, behind one function.

Splits parameters, gradients and optimizer state over the `shard` axis of the mesh, to which the ranks of cp belong.
Collectives: an all-gather of each block's weights before it is used, a reduce-scatter of its gradients after its
backward, and with replicas an all-reduce of the shards, once a step: inside a node first, then between nodes, if
`parallel.shard` x cp fills a node. Experts are spread over their own replicas instead. Mixed precision lives here too
(weights are kept in the master format, gathered in the compute format, gradients reduced in the reduce format), so a
model is wrapped even on one rank. Sources: Rajbhandari et al. 2020 (ZeRO), Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fivefold._torch import UnshardedParameter, finish_backward, reduce_gradients, unsharded_parameters
from fivefold.config.run import Precision
from fivefold.kernels.grouped import add_grouped_weight_gradient
from fivefold.kernels.linear import Deferral, WaitingGradient, add_product
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.state import EXPERTS, local_part

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


class Accumulation:
    """How one stage's gradients add up over the backwards of a step, and when they are reduced.

    ZeRO 2 and 3 reduce after each backward; in a pipeline, where microbatches are under way together, every ZeRO degree
    reduces once a step. There the gradients of large weights do not come through autograd: they are added here to
    FSDP's totals, and so are those of weights that one rank has alone, to what the optimizer takes.
    """

    def __init__(
        self, model: nn.Module, deferral: Deferral | None, zero: int, pipelined: bool, precision: Precision
    ) -> None:
        assert isinstance(model, FSDPModule)
        self.model, self._precision, self._format = model, precision, reduce_dtype(precision)
        self.deferral = Deferral() if deferral is None else deferral
        self.deferral.totals = self
        self._reduces_each, self._gathers_each = zero >= 2 and not pipelined, zero >= 3
        self._last: bool | None = None

    def expect(self, last: bool) -> None:
        """Say, before a backward, whether it is the last of the step, after which the gradients are reduced."""
        if last == self._last:
            return
        self._last = last
        self.model.set_is_last_backward(last)
        self.model.set_requires_gradient_sync(last or self._reduces_each)
        self.model.set_requires_all_reduce(last)
        self.model.set_reshard_after_backward(last or self._gathers_each)

    @torch.no_grad()
    def compute(self, gradients: Sequence[WaitingGradient]) -> None:
        """Compute gradients that waited, and add them up."""
        for _ in self._added(gradients):
            pass

    @torch.no_grad()
    def compute_and_reduce(self, gradients: Sequence[WaitingGradient]) -> None:
        """As `compute`, for the last gradients of a step: each unit is reduced as soon as it has its own."""
        self.expect(last=True)
        lacking = Counter(self._owners.unit_of(gradient.weight) for gradient in gradients)
        for gradient in self._added(gradients):
            unit = self._owners.unit_of(gradient.weight)
            lacking[unit] -= 1
            if not lacking[unit]:
                reduce_gradients(unit)
        finish_backward(self.model)

    def _added(self, gradients: Sequence[WaitingGradient]) -> Iterator[WaitingGradient]:
        """Each gradient after it was added, while what the next one needs is on its way."""
        for number, gradient in enumerate(gradients):
            for near in gradients[number : number + 2]:
                near.start()
            gradient.add_to(self)
            yield gradient

    def add_product(self, parameter: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
        """Add scale x left @ right to the gradient of `parameter`."""
        total = self._owners.total_of(parameter)
        total.gradient = add_product(total.gradient, left, right, self._format, scale)

    def add_grouped_product(self, parameter: Tensor, gradients: Tensor, inputs: Tensor, ends: Tensor) -> None:
        """Add each group's gradients^T @ inputs to the gradient of its matrix in `parameter` (groups, o, i)."""
        total = self._owners.total_of(parameter)
        total.gradient = add_grouped_weight_gradient(total.gradient, gradients, inputs, ends, self._format)

    def add_rows(self, parameter: Tensor, rows: Tensor, gradients: Tensor) -> None:
        """Add each of `gradients` to the row of `parameter`'s gradient that it is for; a row may come repeatedly."""
        total = self._owners.total_of(parameter)
        before = total.gradient
        table = torch.zeros_like(parameter, dtype=self._format) if before is None else before
        total.gradient = table.index_put_((rows,), gradients.to(self._format), accumulate=True)  # sorts: always one sum

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add `gradient` to that of `parameter`."""
        total = self._owners.total_of(parameter)
        before = total.gradient
        total.gradient = gradient.to(self._format) if before is None else before.add_(gradient)

    @cached_property
    def _owners(self) -> Owners:
        return Owners(self.model, self._precision)


def sums_in_place(ranks: int, precision: Precision, offload_parameters: bool) -> bool:
    """Whether gradients of parameters that so many ranks share are added up where the optimizer takes them.

    One rank has nothing to reduce, and FSDP would copy each gradient twice; the format must be the weights'.
    """
    return ranks == 1 and reduce_dtype(precision) == master_dtype(precision) and not offload_parameters


class Total(Protocol):
    """Where one parameter's gradient is added up."""

    gradient: Tensor | None


class SumInPlace:
    """The gradient of a parameter that this rank has alone: what is added up is what the optimizer takes."""

    def __init__(self, parameter: nn.Parameter) -> None:
        assert isinstance(parameter, DTensor), "FSDP has wrapped the model"
        self._parameter = parameter

    @property
    def gradient(self) -> Tensor | None:
        """What was added up so far in this step."""
        return None if self._parameter.grad is None else local_part(self._parameter.grad)

    @gradient.setter
    def gradient(self, total: Tensor | None) -> None:
        if total is not self.gradient:
            whole = self._parameter
            assert total is not None, "a gradient is added to, never taken back"
            self._parameter.grad = DTensor.from_local(total, whole.device_mesh, whole.placements, run_check=False)


class Owners:
    """The gathered parameters of a stage, which are known by their identity, and the units that gather them."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self._model, self._precision = model, precision
        self._known: dict[int, tuple[FSDPModule, Total]] = {}

    def unit_of(self, parameter: Tensor) -> FSDPModule:
        """The unit that gathers and reduces `parameter`."""
        return self._owner(parameter)[0]

    def total_of(self, parameter: Tensor) -> Total:
        """What holds the gradient of `parameter`."""
        return self._owner(parameter)[1]

    def _owner(self, parameter: Tensor) -> tuple[FSDPModule, Total]:
        if id(parameter) not in self._known:  # its unit was gathered for the first time since this was last asked
            self._known = {
                id(each.tensor): (unit, _total(each, self._precision))
                for unit in sharded_units(self._model)
                for each in unsharded_parameters(unit)
            }
        return self._known[id(parameter)]


def _total(parameter: UnshardedParameter, precision: Precision) -> Total:
    piece = parameter.sharded
    assert isinstance(piece, DTensor), "FSDP has wrapped the model"
    alone = sums_in_place(piece.device_mesh.size(), precision, piece.device.type != parameter.tensor.device.type)
    return SumInPlace(piece) if alone else parameter


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
