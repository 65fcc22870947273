"""What the pipeline executor costs the host: `torchrun --nproc_per_node 2 benchmarks/executor.py` (or python, for one).

Stages that compute almost nothing run a schedule, on GPUs if there are any; beside it the same forwards and backwards
run without the executor. The difference in the main thread's time is what an action costs: posting, sending, keeping
count, the clock. Time in which the thread waits for the other rank or the GPU is not in it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config.run import Parallel
from fivefold.data.loader import Microbatch
from fivefold.kernels.linear import Deferral
from fivefold.parallel.mesh import connect
from fivefold.pipeline.execute import Boundary, Pipeline
from fivefold.pipeline.named import make_schedule
from fivefold.pipeline.schedule import Action

TOKENS, WIDTH, MICROBATCHES, REPEATS = 128, 64, 64, 20


class Nothing(nn.Module):
    """A stage that adds one number."""

    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))

    def forward(self, tokens: Tensor, *_: Any, x_td: Tensor | None = None) -> Tensor:
        """The input and a number."""
        return (tokens.new_zeros(TOKENS, WIDTH, dtype=torch.float32) if x_td is None else x_td) + self.number


class Last(Nothing):
    """The same, and a sum as the loss."""

    def forward(self, tokens: Tensor, *rest: Any, x_td: Tensor | None = None) -> Tensor:
        """A scalar."""
        return super().forward(tokens, *rest, x_td=x_td).sum()


def plainly(stages: dict[int, nn.Module], actions: tuple[Action, ...], microbatch: Microbatch, device: Any) -> None:
    """The same computation without the executor."""
    x, outputs = torch.zeros(TOKENS, WIDTH, device=device), {}
    for kind, stage, number in actions:
        if kind == "F":
            given = {"x_td": x.detach().requires_grad_()} if stage else {}
            outputs[stage, number] = stages[stage](microbatch.tokens, None, None, False, **given)
        elif kind != "W":
            out = outputs.pop((stage, number))
            out.backward(None if out.ndim == 0 else x)


def seconds(work: Callable[[], object]) -> float:
    """The main thread's own time, the median of some runs after two; a GPU is waited for between them."""
    found = []
    for _ in range(REPEATS + 2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.thread_time()
        work()
        found.append(time.thread_time() - start)
    return statistics.median(found[2:])


def main() -> None:
    """Measure and print one JSON line a schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    with connect(Parallel(pp=ranks)) as mesh:
        for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)):
            schedule = make_schedule(name, ranks, MICROBATCHES, chunks)
            last = schedule.stages - 1
            stages = {
                stage: (Last() if stage == last else Nothing()).to(mesh.device)
                for stage in schedule.stages_of(mesh.pp.rank)
            }
            free = SimpleNamespace(
                expect=lambda last: None,
                deferral=Deferral(),
                compute=lambda gradients: None,
                compute_and_reduce=lambda gradients: None,
            )
            boundary = Boundary(WIDTH, 1, torch.float32, mesh.device)
            pipeline = Pipeline(stages, dict.fromkeys(stages, free), schedule, mesh.pp, boundary)  # type: ignore[arg-type]
            pipeline.connect()
            tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device=mesh.device)
            microbatch = Microbatch(tokens, tokens, None, False)
            actions = schedule.actions[mesh.pp.rank]
            plain = seconds(lambda s=stages, a=actions, m=microbatch: plainly(s, a, m, mesh.device))
            run = seconds(lambda p=pipeline, m=microbatch: p.train([m] * MICROBATCHES, 1))
            if mesh.is_main:
                micro = (run - plain) / len(actions) * 1e6
                print(
                    json.dumps({"schedule": name, "actions": len(actions), "us_an_action": round(micro, 1)}), flush=True
                )


if __name__ == "__main__":
    main()
