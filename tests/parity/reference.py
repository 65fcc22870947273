"""One process, torch's own optimizer, the whole batch at once: what every layout must equal."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.model.family import family
from fivefold.model.ledger import Ledger
from fivefold.model.moe import MoE
from fivefold.model.objective import Objective
from fivefold.model.part import Part
from tests.parity.cases import GLOBAL_SIZE, LR, MODELS, OPTIM, STEPS, Case, randomize_vectors, share_of

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Reference:
    """What was computed in fp64."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the first step."""
    parameters: dict[str, Tensor]
    """After the last one, and what else the model keeps."""
    moments: dict[str, Tensor]
    """After the last one, as `<kind>.<parameter>`."""


@functools.cache
def reference(model_name: str, packed: bool, rows: int = GLOBAL_SIZE, steps: int = STEPS) -> Reference:
    """Steps of a model on batches of `rows` sequences."""
    spec, case = MODELS[model_name], Case(model_name, micro=rows, packed=packed, rows=rows)
    chosen = family(spec)
    model = chosen.build(spec, Part(objective=Objective.of(case.run))).double()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    chosen.initialize(parameters | buffers, spec, 0)
    randomize_vectors(model_name, parameters | buffers)
    decayed = [p for p in parameters.values() if p.ndim >= 2]
    plain = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=OPTIM.betas, eps=OPTIM.eps, foreach=False)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        share = share_of(case, step, dp_rank=0)
        ledger = Ledger(spec, share.labels, share.mtp_labels, torch.device("cpu"))
        (whole,) = share.microbatches
        loss = model(whole.tokens, whole.labels, whole.documents, packed, ledger=ledger) / share.labels
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in parameters.items()}
        losses.append(loss.item())
        norms.append(torch.stack([p.grad.norm() for p in parameters.values()]).norm().item())
        for p in parameters.values():
            p.grad *= min(1.0, OPTIM.clip / norms[-1])
        optimizer.step()
        optimizer.zero_grad()
        counts = ledger.counts_of(ledger.totals(ledger.vector()))
        for module in model.modules():
            if isinstance(module, MoE):
                module.router.update(counts[module.number], applied=torch.tensor(True))
    after = {name: tensor.detach().clone() for name, tensor in (parameters | buffers).items()}
    moments = {f"{kind}.{name}": optimizer.state[p][kind] for name, p in parameters.items() for kind in MOMENTS}
    return Reference(losses, norms, gradients, after, moments)
