"""The optimizer in CPU memory: master weights and moments are kept and updated there.

The device keeps the weights that FSDP gathers, in the same format. In a step each gradient travels down, the CPU
updates that parameter, and the new weights travel up, so that the transfers of one parameter run beside the update of
another. The host waits for the gradients here, and so at each step. Without CUDA the copies go to other CPU memory.
Source: Ren et al. 2021 (ZeRO-Offload).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fivefold.config.run import Optim
from fivefold.kernels.transfer import Event, Lane, wait
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.links import Links
from fivefold.parallel.state import ShardedParameter, names_of_all


def optimizer_for(
    parameters: Mapping[str, ShardedParameter], optim: Optim, offload: Collection[str], links: Links
) -> ShardedOptimizer:
    """The optimizer of this rank's parameters in a run whose file says `offload`; a collective call over `links`.

    Parameters in CPU memory are updated in place, there.
    """
    names = names_of_all(parameters, links)
    if "optimizer" in offload and "parameters" not in offload:
        return OffloadedOptimizer(parameters, optim, names)
    return ShardedOptimizer(parameters, optim, names)


class OffloadedOptimizer(ShardedOptimizer):
    """Updates copies in CPU memory of this rank's pieces, and then the pieces."""

    def __init__(self, parameters: Mapping[str, ShardedParameter], optim: Optim, names: Sequence[str]) -> None:
        self._device = next(iter(parameters.values())).local.device
        self._pinned = self._device.type == "cuda"
        self._down, self._up = Lane(self._device), Lane(self._device)
        self._current = False
        super().__init__(parameters, optim, names)
        largest = max(local.nbytes for local in self.local.values())
        self._arrivals = [torch.empty(largest, dtype=torch.uint8, pin_memory=self._pinned) for _ in range(2)]

    def memory(self, parameter: ShardedParameter) -> Tensor:
        """New memory beside the CPU, whose values are read at the first step: weights are loaded after this."""
        return torch.empty_like(parameter.local, device="cpu", pin_memory=self._pinned)

    def updated_together(self) -> list[list[str]]:
        """Each by itself."""
        return [[name] for name in self.parameters]

    @torch.no_grad()
    def step(self, gradients: list[Tensor], lr: float, norm: Tensor, clip: float | None) -> None:
        """As `ShardedOptimizer.step`."""
        norm = norm.cpu()
        if torch.isfinite(norm):
            self._read_weights()
            uploaded: Event = None
            arriving = self._fetch(gradients, 0)
            for number, (name, local) in enumerate(self.local.items()):
                gradient, arrived = arriving
                if number + 1 < len(gradients):
                    arriving = self._fetch(gradients, number + 1)
                if arrived is not None:
                    arrived.synchronize()
                self.update([name], [gradient], lr, norm, clip)
                uploaded = self._up.copy([(self.parameters[name].local, local)])
            wait(uploaded, self._device)
        self.zero_grad()

    def weights_changed(self) -> None:
        """They are read anew at the next step."""
        self._current = False

    def materialize(self) -> dict[str, Tensor]:
        """As `ShardedOptimizer.materialize`; the weights are read anew, since they are loaded with the state."""
        self.weights_changed()
        return super().materialize()

    def _read_weights(self) -> None:
        """Take over the weights that the pieces were given: new ones, or a checkpoint's."""
        if not self._current:
            for name, parameter in self.parameters.items():
                self.local[name].copy_(parameter.local)
            self._current = True

    def _fetch(self, gradients: list[Tensor], number: int) -> tuple[Tensor, Event]:
        """A gradient on its way to CPU memory: every other one to the same place, once the one there was used."""
        gradient = gradients[number]
        memory = self._arrivals[number % 2][: gradient.nbytes]
        arriving = memory.view(gradient.dtype).view(gradient.shape)
        return arriving, self._down.copy([(arriving, gradient)])
