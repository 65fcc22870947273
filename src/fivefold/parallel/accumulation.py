"""How the gradients of a step add up before the optimizer takes them, and when they are reduced.

Gradients of small parameters come through autograd to FSDP. Those of large weights come from the kernels, by a
`Deferral`, in a pipeline and where one rank has the weights alone: they are added up in the reduce format, in FSDP's
totals or in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fivefold._torch import UnshardedParameter, finish_backward, reduce_gradients, unsharded_parameters
from fivefold.config.run import Precision
from fivefold.kernels.grouped import add_grouped_weight_gradient
from fivefold.kernels.linear import Deferral, WaitingGradient, add_product
from fivefold.parallel.state import local_part
from fivefold.parallel.zero import DTYPES, master_dtype, reduce_dtype, sharded_units


class Accumulation:
    """How one stage's gradients add up over the backwards of a step, and when they are reduced.

    ZeRO 2 and 3 reduce after each backward; in a pipeline, where microbatches are under way together, every ZeRO degree
    reduces once a step. There the gradients of large weights do not come through autograd: they are added here to
    FSDP's totals, and so are those of weights that one rank has alone, to what the optimizer takes. `offloaded` if the
    weights are kept in another memory than they are computed with.
    """

    def __init__(
        self,
        model: nn.Module,
        deferral: Deferral | None,
        zero: int,
        pipelined: bool,
        precision: Precision,
        offloaded: bool = False,
    ) -> None:
        assert isinstance(model, FSDPModule)
        self.model, self._format = model, reduce_dtype(precision)
        self._in_place = not offloaded and self._format == master_dtype(precision)
        """Whether a gradient may be added up where the optimizer takes it: beside its weight, and in its format."""
        self.deferral = Deferral() if deferral is None else deferral
        self.deferral.totals = self
        self._reduces_each, self._gathers_each = zero >= 2 and not pipelined, zero >= 3
        self._last: bool | None = None
        all_in_place = self._in_place and not pipelined  # only weights that one rank has alone then come here
        self.formats_differ = not all_in_place and self._format != DTYPES[precision.compute]
        """Whether FSDP's totals get gradients here in another format than autograd's. FSDP converts its own at the end
        of a backward that is not the last, and reduces both together only in one format. (Such a backward also keeps
        all gathered weights to the step's end: of one microbatch a step without a pipeline 2 bytes a parameter.)"""

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
        """As `compute`, for the last gradients of a step: each unit is reduced as soon as it has its own, all others at
        the end."""
        self.expect(last=True)
        lacking = Counter(self._owners.unit_of(gradient.weight) for gradient in gradients)
        for gradient in self._added(gradients):
            unit = self._owners.unit_of(gradient.weight)
            lacking[unit] -= 1
            if not lacking[unit]:
                reduce_gradients(unit)
        for unit in reversed([unit for unit in sharded_units(self.model) if unit not in lacking]):
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
        return Owners(self.model, self._in_place)


class Total(Protocol):
    """Where one parameter's gradient is added up."""

    @property
    def gradient(self) -> Tensor | None:
        """What was added up so far."""

    @gradient.setter
    def gradient(self, total: Tensor) -> None:
        """What was added up now."""


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
    def gradient(self, total: Tensor) -> None:
        if total is not self.gradient:
            whole = self._parameter
            self._parameter.grad = DTensor.from_local(total, whole.device_mesh, whole.placements, run_check=False)


class Owners:
    """The gathered parameters of a stage, which are known by their identity, and the units that gather them."""

    def __init__(self, model: nn.Module, in_place: bool) -> None:
        """`in_place` if the gradients of weights that this rank has alone may add up where the optimizer takes them."""
        self._model, self._in_place = model, in_place
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
                id(each.tensor): (unit, self._total(each))
                for unit in sharded_units(self._model)
                for each in unsharded_parameters(unit)
            }
        return self._known[id(parameter)]

    def _total(self, parameter: UnshardedParameter) -> Total:
        """Where the gradient of a parameter is added up: in FSDP's total, which is reduced, or where the optimizer
        looks. One rank has nothing to reduce, and FSDP would copy each gradient twice."""
        piece = parameter.sharded
        assert isinstance(piece, DTensor), "FSDP has wrapped the model"
        return SumInPlace(piece) if self._in_place and piece.device_mesh.size() == 1 else parameter
