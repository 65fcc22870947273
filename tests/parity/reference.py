"""One process, torch's own optimizer, the whole batch at once: what every layout must equal."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.model.family import family
from fivefold.model.part import WHOLE
from tests.parity.cases import GLOBAL_SIZE, LR, MODELS, OPTIM, STEPS, batch, randomize_vectors


@dataclass(frozen=True)
class Reference:
    """What was computed in fp64."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the first step."""
    parameters: dict[str, Tensor]
    """After the last one."""


@functools.cache
def reference(model_name: str, packed: bool, rows: int = GLOBAL_SIZE, steps: int = STEPS) -> Reference:
    """Steps of a model on batches of `rows` sequences."""
    spec = MODELS[model_name]
    chosen = family(spec)
    model = chosen.build(spec, WHOLE).double()
    parameters = dict(model.named_parameters())
    chosen.initialize(parameters, spec, 0)
    randomize_vectors(parameters)
    decayed = [p for p in parameters.values() if p.ndim >= 2]
    plain = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=OPTIM.betas, eps=OPTIM.eps, foreach=False)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        whole = batch(step, packed, spec.vocab, rows)
        loss = model(whole.tokens_bs, whole.labels_bs, whole.documents_bs, packed) / (whole.labels_bs >= 0).sum()
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in parameters.items()}
        losses.append(loss.item())
        norms.append(torch.stack([p.grad.norm() for p in parameters.values()]).norm().item())
        for p in parameters.values():
            p.grad *= min(1.0, OPTIM.clip / norms[-1])
        optimizer.step()
        optimizer.zero_grad()
    return Reference(losses, norms, gradients, {name: p.detach().clone() for name, p in parameters.items()})
