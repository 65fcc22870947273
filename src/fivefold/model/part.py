"""The part of a model that one rank builds, and the ranks that it computes with.

It is what a model's modules know of the layout: the layers of their pipeline stage, the ranks that share each layer's
weights (tp), those that share each sequence (cp), those that share out its experts (ep), what is kept for backward, and
what is added to the loss. Data parallelism is applied from outside and is not in it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from fivefold.config.run import Model, Recompute
from fivefold.kernels.linear import Deferral
from fivefold.model.objective import Objective
from fivefold.parallel.axis import ALONE, Axis


@dataclass(frozen=True)
class Part:
    """By default the whole of a model, on one rank, keeping everything for backward."""

    layers: range | None = None
    """Numbers of this stage's layers in the whole model; None for all."""
    first: bool = True
    """Whether the stage begins the model, and so has the embedding."""
    last: bool = True
    """Whether the stage ends the model, and so has the last norm and the head."""
    tp: Axis = ALONE
    cp: Axis = ALONE
    cp_method: Literal["ring", "gather", "ulysses"] = "ring"
    recompute: Recompute = field(default_factory=Recompute)
    offload_activations: Collection[int] = ()
    """Numbers of this stage's layers whose activations wait in CPU memory."""
    ep: Axis = ALONE
    ep_legs: tuple[Axis, ...] = ()
    """The axes along which tokens travel among the ranks of ep, one after the other."""
    deferral: Deferral | None = None
    """Takes the gradients of the stage's large weights; None if autograd hands them out as any others."""
    expert_deferral: Deferral | None = None
    """Takes those of the experts."""
    objective: Objective = field(default_factory=Objective)

    @property
    def plain(self) -> bool:
        """Whether nothing is split, computed again or moved away, so that a family need not heed its part."""
        whole = self.layers is None and self.first and self.last
        whole &= self.tp.size == self.cp.size == self.ep.size == 1
        return whole and self.recompute.mode == "none" and not self.offload_activations

    def layers_of(self, model: Model) -> range:
        """Numbers of the layers in the whole model."""
        return range(model.layers) if self.layers is None else self.layers


WHOLE = Part()
