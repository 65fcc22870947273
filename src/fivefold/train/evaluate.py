"""Validation: the mean loss over fixed tokens, each counted once, the same value however many ranks share the work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from fivefold.data.loader import Microbatch
from fivefold.parallel.mesh import Mesh
from fivefold.pipeline.execute import Pipeline


def validation_loss(pipeline: Pipeline, batches: Iterable[Microbatch], mesh: Mesh) -> float:
    """Mean loss over all labels of all ranks' `batches`, NaN without any; each rank must bring as many batches."""
    labels = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def counted() -> Iterator[Microbatch]:
        for batch in batches:
            inputs = batch.to(mesh.device, non_blocking=True)
            if pipeline.has_loss and mesh.counts:
                labels.add_((inputs.labels >= 0).sum())
            yield inputs

    losses = pipeline.evaluate(counted())
    loss, count = mesh.sum(torch.stack([losses, labels])).tolist()
    return loss / count if count else math.nan
