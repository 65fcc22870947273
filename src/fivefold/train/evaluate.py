"""Validation: the mean loss over fixed tokens, each counted once, the same value however many ranks share the work."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from fivefold.data.loader import Microbatch
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.zero import release_gathered


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Iterable[Microbatch], mesh: Mesh) -> float:
    """Mean loss over all labels of all ranks' `batches`, NaN without any; each rank must bring as many batches."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # loss, labels
    for batch in batches:
        inputs = batch.to(mesh.device, non_blocking=True)
        total[0] += model(inputs.tokens, inputs.labels, inputs.documents, inputs.packed)
        if mesh.counts:
            total[1] += (inputs.labels >= 0).sum()
    release_gathered(model)
    model.train()
    loss, labels = mesh.sum(total).tolist()
    return loss / labels if labels else math.nan
