"""Optimizer steps a second of a small Llama on a CPU, ours beside transformers' model with torch's AdamW.

    OMP_NUM_THREADS=2 python benchmarks/cpu_step.py [--precision fp32]

The model is tiny-llama with a vocabulary of 8,192 (6.6M parameters), a step is 8 sequences of 256 random tokens. bf16
means fp32 master weights for ours, and everything in bf16 for the other. Needs the extra `hf`.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fivefold.config.files import load_run
from fivefold.config.huggingface import TokenIds, hf_config
from fivefold.config.run import Run
from fivefold.data.loader import Microbatch, Step
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.mesh import connect
from fivefold.parallel.state import sharded_parameters
from fivefold.train.build import build_pipeline, load_initial_weights
from fivefold.train.step import train_step

ROWS, LENGTH, STEPS, WARM = 8, 256, 20, 3


def steps_per_second(step: Callable[[], object]) -> float:
    """Median of STEPS calls after WARM."""
    times = []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1 / sorted(times[WARM:])[STEPS // 2]


def ours(run: Run, tokens: torch.Tensor) -> float:
    """The product's own step: wrapped model, fp32 masters, gradient norm, clipping, fused update."""
    with connect(run.parallel) as mesh:
        pipeline = build_pipeline(run, mesh)
        parameters = sharded_parameters(pipeline.stages, mesh)
        load_initial_weights(parameters, run, lambda kind, fields: None)
        optimizer = ShardedOptimizer(parameters, run.optim, list(parameters))
        batch = Step([Microbatch(tokens[:, :-1], tokens[:, 1:], None, False)], ROWS * LENGTH, 0, ROWS)
        return steps_per_second(lambda: train_step(pipeline, batch, optimizer, mesh, lr=1e-4, clip=1.0))


def transformers_step(run: Run, tokens: torch.Tensor) -> float:
    """The same architecture, eager, without clipping."""
    model = LlamaForCausalLM(LlamaConfig(**hf_config(run.model, TokenIds(), "float32")))
    model.to(torch.bfloat16 if run.precision.compute == "bf16" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return steps_per_second(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    precision = parser.parse_args().precision
    flags = ["--model.vocab", "8192", "--precision.compute", precision]
    run = load_run(Path(__file__).with_name("cpu_step.yaml"), flags)
    tokens = torch.randint(0, 8192, (ROWS, LENGTH + 1))
    figures = {"ours": ours(run, tokens), "transformers": transformers_step(run, tokens)}
    rounded = {name: round(value, 2) for name, value in figures.items()}
    print(json.dumps({"precision": precision, "threads": torch.get_num_threads(), "steps/s": rounded}))


if __name__ == "__main__":
    main()
