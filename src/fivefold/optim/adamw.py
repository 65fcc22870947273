"""AdamW for parameters on CUDA: torch's in all but the kernel, which does not write the gradients back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivefold._torch import foreach_add_
from fivefold.kernels.adamw import adamw_


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True), of the same arithmetic, state and checkpoints.

    Gradients are divided by `grad_scale`, and nothing changes where `found_inf` is 1, as torch.amp.GradScaler sets
    them. Gradients stay as they were.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @staticmethod
    def takes(parameter: Tensor) -> bool:
        """Whether the kernel is made for such a parameter."""
        return parameter.is_cuda and parameter.dtype != torch.float64 and parameter.is_contiguous()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients. All are on one device."""
        assert closure is None, "nothing is computed again in here"
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        device = parameters[0].device
        divisor = torch.ones((), device=device) if self.grad_scale is None else self.grad_scale
        found_inf = torch.zeros((), device=device) if self.found_inf is None else self.found_inf
        states = [self._state_of(parameter) for parameter in parameters]
        foreach_add_([state["step"] for state in states], 1.0 - found_inf)
        settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        for parameter, state in zip(parameters, states, strict=True):
            assert parameter.grad is not None
            moments = state["exp_avg"], state["exp_avg_sq"]
            adamw_(parameter, parameter.grad, *moments, state["step"], divisor=divisor, found_inf=found_inf, **settings)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """The parameter's state, which its first update makes."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state
