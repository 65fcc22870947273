"""One process, torch's own optimizer, the whole batch at once: what every layout must equal."""

from __future__ import annotations

import torch

from fivefold.model.family import family
from tests.parity.cases import LR, MODELS, OPTIM, STEPS, batch, randomize_vectors


def reference(model_name: str, packed: bool) -> dict:
    """Losses, gradient norms, the first step's gradients, and the parameters at the end, in fp64."""
    spec = MODELS[model_name]
    chosen = family(spec)
    model = chosen.build(spec).double()
    chosen.initialize(model, spec, 0)
    randomize_vectors(model)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": OPTIM.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=OPTIM.betas, eps=OPTIM.eps, foreach=False)
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        whole = batch(step, packed)
        loss = model(whole.tokens_bs, whole.labels_bs, whole.documents_bs, packed) / (whole.labels_bs >= 0).sum()
        loss.backward()
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        losses.append(loss.item())
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        for p in model.parameters():
            p.grad *= min(1.0, OPTIM.clip / norms[-1])
        optimizer.step()
        optimizer.zero_grad()
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": parameters}
