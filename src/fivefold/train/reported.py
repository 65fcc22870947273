"""What a step's totals come to in its record: how even the experts' load was, what was dropped, the further losses.

Only what the model has and the run weighs is told. Works on the host, on what was copied there.
"""

from __future__ import annotations

import math

import torch

from fivefold.config.run import Model, Run
from fivefold.model.ledger import Totals
from fivefold.model.spec import moe_layers


def reported(run: Run, totals: Totals) -> dict[str, float]:
    """The fields of a `StepRecord` that not every model has, but for what stopwatches say."""
    fields = {}
    if run.model.moe is not None:
        largest = totals.counts.amax(1) / totals.counts.mean(1)
        fields["moe_load_max"] = largest.max().item()
        fields["moe_load_mean"] = largest.mean().item()
        fields["moe_entropy"] = _evenness(totals)
        fields["moe_dropped"] = (totals.dropped.sum() / totals.counts.sum()).item()
    if run.loss.balance_sequence or run.loss.balance_global:
        fields["balance_loss"] = totals.balance_loss.item()
    if run.loss.router_z:
        fields["z_loss"] = totals.z_loss.item()
    return fields | {f"mtp_loss/{depth}": loss for depth, loss in enumerate(totals.mtp_losses.tolist(), 1)}


def choices_by_layer(model: Model, totals: Totals) -> dict[int, list[int]]:
    """How often each expert was chosen, by the number of the layer; those of multi-token prediction come last."""
    return dict(zip(moe_layers(model), totals.counts.long().tolist(), strict=True))


def _evenness(totals: Totals) -> float:
    """The mean over layers of the entropy of the choices over that of even ones; 1 if there is one expert."""
    experts = totals.counts.shape[1]
    if experts == 1:
        return 1.0
    shares = totals.counts / totals.counts.sum(1, keepdim=True)
    return (torch.special.entr(shares).sum(1).mean() / math.log(experts)).item()
