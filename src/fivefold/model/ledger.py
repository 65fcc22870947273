"""What forwards in training report beside the loss: where tokens went, what was dropped, the auxiliary losses.

Forward changes no state, since recompute and validation run it again. So it reports here, once a microbatch, and what
is to be changed is changed once a step, from the sums over all ranks. The sums of all ranks travel as one vector, which
has the same length on each: a rank knows its own layers and leaves zeros for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.config.run import Model
from fivefold.model.spec import moe_layers


@dataclass(frozen=True)
class Routed:
    """What became of a layer's choices in one microbatch, on this rank. Counts are of tokens, whole numbers."""

    counts_e: Tensor
    """Choices of each expert, dropped ones among them."""
    dropped: Tensor
    """Choices that found their expert full."""
    balance_loss: Tensor
    """As it is added to the loss."""
    z_loss: Tensor
    """As it is added to the loss."""


@dataclass(frozen=True)
class Totals:
    """The sums of a step over all ranks, on the device."""

    counts: Tensor
    """(moe layers, experts): choices of each expert."""
    dropped: Tensor
    """(moe layers,): choices that found their expert full."""
    balance_loss: Tensor
    z_loss: Tensor
    mtp_losses: Tensor
    """(depths,): the mean loss of each depth."""


class Ledger:
    """The reports of one rank in one step. No dataclass: FSDP looks into those that forward is given."""

    def __init__(self, model: Model, labels: int, mtp_labels: Sequence[int], device: torch.device) -> None:
        """`labels` and `mtp_labels` are those of the whole step: of the next token, and of each depth after it."""
        self._layers = {number: place for place, number in enumerate(moe_layers(model))}
        experts = 0 if model.moe is None else model.moe.experts
        self._counts = torch.zeros(len(self._layers), experts, dtype=torch.float64, device=device)
        self._sums = torch.zeros(len(self._layers) + 2 + model.mtp, dtype=torch.float64, device=device)
        self.mtp_divisors = [max(1, count) for count in mtp_labels]
        """What the sum of a depth's losses is divided by."""
        self.divisor = max(1, labels)
        """What the sum of the next token's losses is divided by."""

    def routed(self, layer: int, routed: Routed) -> None:
        """A layer has sent a microbatch's tokens to its experts."""
        place, losses = self._layers[layer], len(self._layers)
        self._counts[place] += routed.counts_e
        self._sums[place] += routed.dropped
        self._sums[losses] += routed.balance_loss
        self._sums[losses + 1] += routed.z_loss

    def predicted(self, depth: int, loss: Tensor) -> None:
        """The sum of a microbatch's losses in one depth of multi-token prediction."""
        self._sums[len(self._layers) + 2 + depth] += loss / self.mtp_divisors[depth]

    def vector(self) -> Tensor:
        """All of this rank's sums, in fp64."""
        return torch.cat([self._counts.flatten(), self._sums])

    def totals(self, vector: Tensor) -> Totals:
        """The sums of all ranks' vectors by their names."""
        counts, sums = vector[: self._counts.numel()].view_as(self._counts), vector[self._counts.numel() :]
        layers = len(self._layers)
        return Totals(counts, sums[:layers], sums[layers], sums[layers + 1], sums[layers + 2 :])

    def counts_of(self, totals: Totals) -> Mapping[int, Tensor]:
        """Each moe layer's counts (experts,), by the layer's number."""
        return {number: totals.counts[place] for number, place in self._layers.items()}
