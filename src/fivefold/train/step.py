"""One optimizer step: the pipeline's gradients, one gradient norm, one update.

The loss is a sum over labels, and the number of labels of the whole step is known beforehand, so each microbatch's
sum is multiplied by 1/N and gradients are final sums: no factor of ranks or microbatches appears anywhere. Nothing
here waits for the device: what is to be reported stays in tensors until `read`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.data.loader import Step
from fivefold.model.ledger import Ledger, Totals
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.moment import Moment
from fivefold.parallel.stopwatch import Lap
from fivefold.parallel.tensor import sum_partial
from fivefold.pipeline.execute import Pipeline


@dataclass(frozen=True)
class StepResult:
    """What a step computed, still on the device. All but the update's time is the same on all ranks."""

    loss: Tensor  # mean over all labels of the step
    norm: Tensor  # global gradient norm before clipping
    squares: Tensor  # (parameters of the whole model,) sum of squares of each one's gradient
    totals: Totals  # what the model reports beside the loss
    update: Lap  # what this rank's device took to update the weights


def train_step(
    pipeline: Pipeline, batch: Step, optimizer: ShardedOptimizer, mesh: Mesh, *, lr: float, clip: float | None
) -> StepResult:
    """Update the model once with the gradient of the mean loss of `batch`, this rank's share of the global batch."""
    ledger = Ledger(pipeline.model, batch.labels, batch.mtp_labels, mesh.device)
    loss = pipeline.train(batch.microbatches, ledger)
    gradients = optimizer.gradients()
    sum_partial(optimizer.parameters.values(), gradients, mesh.tp)
    mine = [loss[None], optimizer.squares(gradients).to(mesh.device), ledger.vector()]
    total, squares, reported = mesh.sum(torch.cat(mine)).split([len(each) for each in mine])
    norm, totals = squares.sum().sqrt(), ledger.totals(reported)
    begun = Moment.mark(mesh.device)
    optimizer.step(gradients, lr, norm, clip)
    pipeline.renew_copies()
    update = Lap([(begun, Moment.mark(mesh.device))])
    if pipeline.routers:
        counts, applied = ledger.counts_of(totals), torch.isfinite(norm)
        for layer, router in pipeline.routers.items():
            router.update(counts[layer], applied)
    return StepResult(total[0], norm, squares, totals, update)
