"""What a rank runs: a layout through the product's own path, a fault put into a gradient, a validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.config.run import Data, Parallel, Precision, Run, Source
from fivefold.data.loader import Microbatch, Step, sample_numbers, validation_batches
from fivefold.data.tokens import TokenSet
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.mesh import Mesh, mesh_of
from fivefold.train.build import build_model, load_initial_weights
from fivefold.train.evaluate import validation_loss
from fivefold.train.step import StepResult, train_step
from tests.parity.cases import GLOBAL_SIZE, LR, MODELS, OPTIM, STEPS, Case, batch, randomize_vectors


class Rank:
    """A model and its optimizer on this rank, in fp64."""

    def __init__(self, case: Case) -> None:
        self.case = case
        parallel = Parallel(zero=case.zero)
        self.mesh: Mesh = mesh_of(parallel, torch.device("cpu"))
        run = Run(
            name="parity",
            steps=STEPS,
            model=MODELS[case.model],
            data=Data(train=[Source(path=Path("none"))]),
            parallel=parallel,
            precision=Precision(compute="fp64"),
        )
        self.model: nn.Module = build_model(run, self.mesh)
        load_initial_weights(self.model, run, lambda kind, fields: None)
        randomize_vectors(self.model)
        self.optimizer = ShardedOptimizer(self.model.named_parameters(), OPTIM)
        self.gradients: dict[str, Tensor] = {}
        self._local_gradients = self.optimizer.gradients
        self.optimizer.gradients = self._seen_gradients  # type: ignore[method-assign]

    def _seen_gradients(self) -> list[Tensor]:
        """What the step takes, after the whole gradients were kept for the test."""
        self.gradients = {name: full(p.grad) for name, p in self.optimizer.parameters.items() if p.grad is not None}
        return self._local_gradients()

    def step(self, number: int) -> StepResult:
        """One optimizer step on this rank's share of the batch."""
        share = share_of(self.case, number, self.mesh)
        return train_step(self.model, share, self.optimizer, self.mesh, lr=LR, clip=OPTIM.clip, zero=self.case.zero)

    def parameters(self) -> dict[str, Tensor]:
        """The whole parameters."""
        return {name: full(p) for name, p in self.model.named_parameters()}


def run_layout(case: Case) -> dict[str, Any]:
    """As `reference`, on the ranks of this group."""
    rank = Rank(case)
    results = [rank.step(0)]
    gradients = rank.gradients
    results += [rank.step(number) for number in range(1, STEPS)]
    return {
        "losses": [result.loss.item() for result in results],
        "norms": [result.norm.item() for result in results],
        "gradients": gradients,
        "parameters": rank.parameters(),
    }


def run_fault(case: Case, value: float, parameter: str) -> dict[str, Any]:
    """A step in which the last rank's shard of one gradient holds `value`: what changed, and what was reported."""
    rank = Rank(case)
    rank.step(0)
    before = {**rank.parameters(), **{name: full(v) for name, v in rank.optimizer.state().items()}}
    seen = rank._local_gradients

    def with_fault() -> list[Tensor]:
        gradients = seen()
        number = list(rank.optimizer.parameters).index(parameter)
        if rank.mesh.rank == rank.mesh.world - 1:
            gradients[number].view(-1)[0] = value
        return gradients

    rank.optimizer.gradients = with_fault  # type: ignore[method-assign]
    result = rank.step(1)
    after = {**rank.parameters(), **{name: full(v) for name, v in rank.optimizer.state().items()}}
    return {
        "norm": result.norm.item(),
        "changed": sorted(name for name in before if not torch.equal(before[name], after[name])),
        "not finite": [
            name
            for name, square in zip(rank.optimizer.parameters, result.squares, strict=True)
            if not square.isfinite()
        ],
    }


def run_validation(case: Case, tokens: str, micro_size: int) -> float:
    """The validation loss over a token set, and again after a step's worth of gathered weights were dropped."""
    rank = Rank(case)
    mesh = rank.mesh

    def loss() -> float:
        batches = validation_batches(
            TokenSet.open(tokens), 24, 10_000, micro_size, mesh.dp_rank, mesh.dp, document_mask=True
        )
        return validation_loss(rank.model, batches, mesh)

    first = loss()
    rank.step(0)
    assert loss() != first, "validation used the weights from before the step"
    return first


def share_of(case: Case, step: int, mesh: Mesh) -> Step:
    """This rank's microbatches of the whole batch."""
    whole = batch(step, case.packed)
    microbatches = [
        Microbatch(whole.tokens_bs[rows], whole.labels_bs[rows], whole.documents_bs[rows], case.packed)
        for rows in torch.from_numpy(sample_numbers(0, GLOBAL_SIZE, case.micro_size, mesh.dp_rank, mesh.dp))
    ]
    return Step(microbatches, int((whole.labels_bs >= 0).sum()), 0, GLOBAL_SIZE)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
