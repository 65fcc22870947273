"""A gloo process that runs many layouts one after the other: `python -m tests.parity.worker OUT CASES.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fivefold.config.run import Data, Parallel, Precision, Run, Source
from fivefold.data.loader import Microbatch, Step, sample_numbers
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.mesh import connect, mesh_of
from fivefold.train.build import build_model, load_initial_weights
from fivefold.train.step import train_step
from tests.parity.cases import GLOBAL_SIZE, LR, MODELS, OPTIM, STEPS, Case, batch, randomize_vectors


def run_case(case: Case) -> dict:
    """As `reference`, through the product's own path."""
    parallel = Parallel(zero=case.zero)
    mesh = mesh_of(parallel, torch.device("cpu"))
    run = Run(
        name="parity",
        steps=STEPS,
        model=MODELS[case.model],
        data=Data(train=[Source(path=Path("none"))]),
        parallel=parallel,
        precision=Precision(compute="fp64"),
    )
    model = build_model(run, mesh)
    load_initial_weights(model, run, lambda kind, fields: None)
    randomize_vectors(model)
    optimizer = ShardedOptimizer(model.named_parameters(), OPTIM)
    losses, norms, gradients = [], [], {}
    keep_gradients = optimizer.gradients
    for step in range(STEPS):
        if step == 0:

            def keeping():
                gradients.update({name: full(p.grad) for name, p in optimizer.parameters.items()})
                return keep_gradients()

            optimizer.gradients = keeping
        else:
            optimizer.gradients = keep_gradients
        result = train_step(
            model, share(case, step, mesh.dp_rank, mesh.dp), optimizer, mesh, lr=LR, clip=OPTIM.clip, zero=case.zero
        )
        losses.append(result.loss.item())
        norms.append(result.norm.item())
    parameters = {name: full(p) for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "parameters": parameters}


def share(case: Case, step: int, dp_rank: int, dp: int) -> Step:
    """This rank's microbatches of the whole batch."""
    whole = batch(step, case.packed)
    microbatches = [
        Microbatch(whole.tokens_bs[rows], whole.labels_bs[rows], whole.documents_bs[rows], case.packed)
        for rows in torch.from_numpy(sample_numbers(0, GLOBAL_SIZE, case.micro_size, dp_rank, dp))
    ]
    return Step(microbatches, int((whole.labels_bs >= 0).sum()), 0, GLOBAL_SIZE)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def main() -> None:
    torch.set_num_threads(1)
    out, cases = Path(sys.argv[1]), [Case(**fields) for fields in json.loads(sys.argv[2])]
    with connect(Parallel()):
        for case in cases:
            result = run_case(case)
            if dist.get_rank() == 0:
                torch.save(result, out / f"{case}.pt")


if __name__ == "__main__":
    main()
