"""One rank of a layout, through the product's own path: its model, its optimizer, its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config.run import Parallel
from fivefold.data.loader import Step
from fivefold.optim.offload import optimizer_for
from fivefold.parallel.mesh import Mesh, mesh_of
from fivefold.parallel.state import sharded_parameters
from fivefold.train.build import buffers_of, build_pipeline, load_initial_weights
from fivefold.train.step import StepResult, train_step
from tests.parity.cases import LR, NEAR, OPTIM, Case, randomize_vectors, share_of
from tests.parity.faults import FAULTS
from tests.parity.pieces import Pieces, piece
from tests.ranks import kept, rejoin


@dataclass(frozen=True)
class Outcome:
    """What a rank saw of a layout's steps."""

    losses: list[float]
    norms: list[float]
    gradients: Pieces
    """Of the first step, as the optimizer takes them, before they are clipped."""
    parameters: Pieces
    """After the last one."""


class Rank:
    """A model and its optimizer on this rank."""

    def __init__(self, case: Case, **changes: Any) -> None:
        """`changes` are fields of the run file that are not those of `case.run`."""
        self.case = case
        self.mesh = mesh_for(case.parallel, case.near)
        run = case.run.model_copy(update=changes)
        self.pipeline = build_pipeline(run, self.mesh)
        self.state = sharded_parameters(self.pipeline.stages, self.mesh)
        self.buffers = buffers_of(self.pipeline.stages)
        load_initial_weights(self.state, self.buffers, run, lambda kind, fields: None)
        randomize_vectors(case.model, {name: each.whole for name, each in self.state.items()} | self.buffers)
        self.pipeline.renew_copies()
        self.optimizer = optimizer_for(self.state, OPTIM, run.offload, self.mesh.pp)
        self.gradients: Pieces = {}
        self._update = self.optimizer.step
        self.optimizer.step = self._seen_update  # type: ignore[method-assign]

    @property
    def model(self) -> nn.Module:
        """The whole model, of a layout with one stage."""
        return self.pipeline.stages[0]

    def _seen_update(self, gradients: list[Tensor], *rest: Any) -> None:
        """The optimizer's update, after a copy of what it takes was kept for the test."""
        named = zip(self.state.items(), gradients, strict=True)
        self.gradients = {name: piece(each.whole, gradient) for (name, each), gradient in named}
        self._update(gradients, *rest)

    def step(self, number: int) -> StepResult:
        """One optimizer step on this rank's share of a batch."""
        return self.train(share_of(self.case, number, self.mesh.dp_rank))

    def train(self, share: Step) -> StepResult:
        """One optimizer step on any microbatches."""
        return train_step(self.pipeline, share, self.optimizer, self.mesh, lr=LR, clip=OPTIM.clip)

    def parameters(self) -> Pieces:
        """This rank's pieces, and what else it keeps."""
        whole = {name: each.whole for name, each in self.state.items()} | self.buffers
        return {name: piece(each) for name, each in whole.items()}


def run_steps(case: Case) -> Outcome:
    """The steps of a layout."""
    with FAULTS[case.fault]():
        rank = Rank(case)
        results = [rank.step(0)]
        gradients = rank.gradients
        results += [rank.step(number) for number in range(1, case.steps)]
    losses = [result.loss.item() for result in results]
    norms = [result.norm.item() for result in results]
    return Outcome(losses, norms, gradients, rank.parameters())


def mesh_for(parallel: Parallel, near: int = NEAR) -> Mesh:
    """The mesh of a layout, kept until another one is asked for: groups of ranks are threads and sockets."""
    key = (parallel.pp, parallel.tp, parallel.cp, parallel.ep, parallel.replicate, parallel.zero == 0, near)
    if key not in kept:
        if kept:
            rejoin()
        kept[key] = mesh_of(parallel, torch.device("cpu"), near)
    return kept[key]
