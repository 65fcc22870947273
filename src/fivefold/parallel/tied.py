"""The embedding over pipeline stages: the first stage owns the weight, and the last one may have a copy of it.

It has one for a tied head, and for multi-token prediction, which looks tokens up. The copy is no parameter of its own:
neither checkpoints nor the optimizer nor the gradient norm know it. Its gradient is added to the owner's once a step,
and the owner's new weight comes back after each update. Both are cut alike by tp and FSDP, so ranks of the same
(dp, cp, tp) coordinate exchange their pieces: one to the first stage before the norm, one to the last after the update,
and none where one rank has both stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fivefold.parallel.links import Links
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.state import TIED_COPY, local_part


class TiedEmbedding(Protocol):
    """This rank's side of a weight that the first stage owns and the last one has a copy of."""

    def add_gradients(self) -> None:
        """Add the copy's gradient to the owner's: after backward, before anyone looks at gradients."""

    def share(self) -> None:
        """Give the owner's weight to the copy: when it was loaded, and after each update."""


def tied_embedding(stages: Mapping[int, nn.Module], placement: Sequence[int], mesh: Mesh) -> TiedEmbedding | None:
    """What this rank has to do for a copied embedding; None if the model has no copy, or this rank has no part in it.

    `stages` are those of this rank, wrapped and in their memory; `placement` says which rank has each. A collective
    call over pp, which also connects the two ranks.
    """
    last = len(placement) - 1
    first_rank, last_rank = placement[0], placement[last]
    found = _copy_in(stages[last]) if last in stages else None
    name = next((each for each in mesh.pp.gather(None if found is None else found[0]) if each is not None), None)
    if name is None:
        return None
    if first_rank == last_rank:
        return None if found is None else _OnOneRank(stages[0].get_parameter(name), found[1])
    mesh.pp.warm_up([(first_rank, last_rank), (last_rank, first_rank)], mesh.device)
    if found is not None:
        return _Copy(found[1], _Partner(mesh.pp, first_rank, mesh.device))
    if 0 in stages:
        return _Owner(stages[0].get_parameter(name), _Partner(mesh.pp, last_rank, mesh.device))
    return None


@dataclass(frozen=True)
class _OnOneRank:
    owner: nn.Parameter
    copy: nn.Parameter

    @torch.no_grad()
    def add_gradients(self) -> None:
        _gradient(self.owner).add_(_gradient(self.copy))
        self.copy.grad = None

    @torch.no_grad()
    def share(self) -> None:
        local_part(self.copy).copy_(local_part(self.owner))


@dataclass(frozen=True)
class _Partner:
    """The rank with the other side. What is exchanged lies on the device, also where the pieces are in CPU memory."""

    links: Links
    rank: int
    device: torch.device

    def send(self, piece: Tensor) -> None:
        """Give the other side a piece, and wait until it has left."""
        self.links.send(piece.to(self.device), self.rank).wait()

    def receive(self, like: Tensor) -> Tensor:
        """The other side's piece, of the shape and format of `like`, where that is."""
        return self.links.receive(like.shape, like.dtype, self.device, self.rank).wait().to(like.device)


@dataclass(frozen=True)
class _Owner:
    weight: nn.Parameter
    partner: _Partner

    @torch.no_grad()
    def add_gradients(self) -> None:
        gradient = _gradient(self.weight)
        gradient.add_(self.partner.receive(gradient))  # two numbers: one rounding in any format

    @torch.no_grad()
    def share(self) -> None:
        self.partner.send(local_part(self.weight))


@dataclass(frozen=True)
class _Copy:
    weight: nn.Parameter
    partner: _Partner

    @torch.no_grad()
    def add_gradients(self) -> None:
        self.partner.send(_gradient(self.weight))
        self.weight.grad = None

    @torch.no_grad()
    def share(self) -> None:
        piece = local_part(self.weight)
        piece.copy_(self.partner.receive(piece))


def _copy_in(stage: nn.Module) -> tuple[str, nn.Parameter] | None:
    """The name of the weight that `stage` has a copy of, and the copy."""
    holder = next((module for module in stage.modules() if hasattr(module, TIED_COPY)), None)
    return None if holder is None else (getattr(holder, TIED_COPY), holder.get_parameter("weight"))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's piece of the gradient, of zeros if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)
