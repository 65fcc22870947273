"""One optimizer step: forward and backward of each microbatch, one gradient norm, one update.

The loss is a sum over labels, and the number of labels of the whole step is known beforehand, so each microbatch's
sum is multiplied by 1/N and gradients are final sums: no factor of ranks or microbatches appears anywhere. Nothing
here waits for the device: what is to be reported stays in tensors until `read`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fivefold.data.loader import Step
from fivefold.optim.norm import sums_of_squares
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor import sum_partial
from fivefold.parallel.zero import begin_microbatch


@dataclass(frozen=True)
class StepResult:
    """What a step computed, still on the device. Everything in it is the same on all ranks."""

    loss: Tensor  # mean over all labels of the step
    norm: Tensor  # global gradient norm before clipping
    squares: Tensor  # (parameters,) sum of squares of each parameter's gradient


def train_step(
    model: nn.Module, batch: Step, optimizer: ShardedOptimizer, mesh: Mesh, *, lr: float, clip: float | None, zero: int
) -> StepResult:
    """Update the model once with the gradient of the mean loss of `batch`, this rank's share of the global batch."""
    loss = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for number, microbatch in enumerate(batch.microbatches, start=1):
        begin_microbatch(model, zero, last=number == len(batch.microbatches))
        inputs = microbatch.to(mesh.device, non_blocking=True)
        mean_share = model(inputs.tokens, inputs.labels, inputs.documents, inputs.packed) / max(1, batch.labels)
        mean_share.backward()
        loss += mean_share.detach()

    gradients = optimizer.gradients()
    sum_partial(optimizer.parameters.values(), gradients, mesh.tp)
    totals = mesh.sum(torch.cat([loss[None], sums_of_squares(gradients, optimizer.copies).to(mesh.device)]))
    norm = totals[1:].sum().sqrt()
    optimizer.step(gradients, lr, norm, clip)
    return StepResult(totals[0], norm, totals[1:])
