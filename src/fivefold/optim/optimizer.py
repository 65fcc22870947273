"""The optimizer of a sharded model: torch's, run on the local shards, with clipping folded into its update.

The update is element-wise, so it works on this rank's pieces of the parameters as plain tensors, which costs no
dispatch. A gradient that is not finite changes nothing: weights, moments and their step count stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fivefold._torch import divides_in_kernel, foreach_mul_
from fivefold.config.run import Optim
from fivefold.errors import UserError
from fivefold.optim.adamw import AdamW
from fivefold.optim.norm import SumsOfSquares
from fivefold.parallel.state import ShardedParameter, local_part
from fivefold.plugins import find

Factory = Callable[[list[dict[str, Any]], Optim], torch.optim.Optimizer]


def adamw(groups: list[dict[str, Any]], optim: Optim) -> torch.optim.Optimizer:
    """AdamW (Loshchilov & Hutter 2019): on CUDA by a kernel of our own, else by torch's fused one."""
    ours = all(AdamW.takes(parameter) for group in groups for parameter in group["params"])
    kind = AdamW if ours else torch.optim.AdamW
    return kind(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


OPTIMIZERS: Mapping[str, Factory] = {"adamw": adamw}


class ShardedOptimizer:
    """Updates this rank's pieces of `parameters`. Those with fewer than two dimensions are not decayed.

    `names` are those of the whole model's parameters, the same on every rank.
    """

    def __init__(self, parameters: Mapping[str, ShardedParameter], optim: Optim, names: Sequence[str]) -> None:
        self.parameters, self.names = parameters, list(names)
        self.local = {name: nn.Parameter(self.memory(p)) for name, p in parameters.items()}
        self.inner: dict[str, torch.optim.Optimizer] = {}
        self._name = optim.name
        self._element_wise: set[torch.optim.Optimizer] = set()
        for names in self.updated_together():
            self.inner |= dict.fromkeys(names, self._optimizer_of(names, optim))

    def memory(self, parameter: ShardedParameter) -> Tensor:
        """Where this rank's piece of a parameter is updated: in place."""
        return parameter.local

    def updated_together(self) -> list[list[str]]:
        """The parameters, divided into those that one of torch's optimizers updates: all."""
        return [list(self.parameters)]

    @cached_property
    def squares(self) -> SumsOfSquares:
        """From `gradients()` to this rank's share of each gradient's sum of squares, (names,) in fp64, beside them.

        Those of other stages' parameters are 0 here: summed over all ranks, they are those of the whole gradients.
        """
        return SumsOfSquares(self.parameters, self.names)

    def gradients(self) -> list[Tensor]:
        """This rank's piece of each parameter's gradient, in the order of `parameters`; zeros where there is none."""
        return [
            torch.zeros_like(p.local) if p.parameter.grad is None else local_part(p.parameter.grad)
            for p in self.parameters.values()
        ]

    def step(self, gradients: list[Tensor], lr: float, norm: Tensor, clip: float | None) -> None:
        """Update with gradients scaled down to a global norm of `clip`; nothing at all if `norm` is not finite."""
        self.update(list(self.parameters), gradients, lr, norm.to(gradients[0].device), clip)
        self.zero_grad()

    def update(self, names: list[str], gradients: list[Tensor], lr: float, norm: Tensor, clip: float | None) -> None:
        """Update those that are updated together, on their device, where gradients and norm must be.

        Raises UserError after the first update if what the optimizer keeps shows that it is not element-wise.
        """
        inner = self.inner[names[0]]
        for group in inner.param_groups:
            group["lr"] = lr
        for name, gradient in zip(names, gradients, strict=True):
            self.local[name].grad = gradient
        excess = torch.ones_like(norm) if clip is None else (norm / clip).clamp(min=1.0)
        if divides_in_kernel(inner):
            _fused_step(inner, gradients, excess, norm)
        elif torch.isfinite(norm):
            foreach_mul_(gradients, 1.0 / excess)
            inner.step()
        if inner.state and inner not in self._element_wise:
            self._check_element_wise(names)
            self._element_wise.add(inner)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in [*(p.parameter for p in self.parameters.values()), *self.local.values()]:
            parameter.grad = None

    def state(self) -> dict[str, Tensor]:
        """The state as `<kind>.<parameter>`, sharded as the parameter is; empty before the first step. Scalars are
        plain tensors: they are the same on all ranks."""
        return {
            f"{kind}.{name}": self.parameters[name].like(value) if value.ndim else value
            for name, local in self.local.items()
            for kind, value in self.inner[name].state.get(local, {}).items()
            if isinstance(value, Tensor)
        }

    def weights_changed(self) -> None:
        """Say that the pieces were given other values. Nothing here: they are what is updated."""

    def materialize(self) -> dict[str, Tensor]:
        """`state()`, allocated if it was not there yet; its values are then meaningless and must be loaded."""
        for names in self.updated_together():
            pieces = [self.local[name] for name in names]
            kept = [local.detach().clone() for local in pieces]
            for local in pieces:
                local.grad = torch.zeros_like(local)
            self.inner[names[0]].step()
            for local, value in zip(pieces, kept, strict=True):
                local.detach().copy_(value)
                local.grad = None
        return self.state()

    def _check_element_wise(self, names: list[str]) -> None:
        """A shard's rows are not the whole's, so what is kept for a row or a column would depend on the layout."""
        for name in names:
            local = self.local[name]
            for kind, value in self.inner[name].state.get(local, {}).items():
                if isinstance(value, Tensor) and value.ndim and value.shape != local.shape:
                    raise UserError(
                        f"optim.name = {self._name} keeps {kind} of shape {tuple(value.shape)} for {name}, of which "
                        f"this rank has {tuple(local.shape)}: an optimizer sees shards, so its update must be "
                        "element-wise and its state have the parameter's shape, or be a single number"
                    )

    def _optimizer_of(self, names: list[str], optim: Optim) -> torch.optim.Optimizer:
        matrices = [self.local[name] for name in names if len(self.parameters[name].shape) >= 2]
        vectors = [self.local[name] for name in names if len(self.parameters[name].shape) < 2]
        groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return find("optimizers", optim.name, OPTIMIZERS)([group for group in groups if group["params"]], optim)


def _fused_step(inner: torch.optim.Optimizer, gradients: list[Tensor], excess: Tensor, norm: Tensor) -> None:
    """The kernel divides by `grad_scale` and leaves all as it is where `found_inf` is 1: no wait for the device.

    `grad_scale` is fp32, so fp64 gradients are divided beforehand.
    """
    exact = gradients[0].dtype == torch.float64
    if exact:
        foreach_mul_(gradients, 1.0 / excess)
    inner.grad_scale = None if exact else excess.float()  # type: ignore[attr-defined]
    inner.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
    inner.step()
