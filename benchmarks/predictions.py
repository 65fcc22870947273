"""What the planner says of runs, beside what they measure on this machine's GPUs: `python benchmarks/predictions.py`.

Each row is a run of its own on random tokens, `dense16.yaml`, `llama8b.yaml` or `moe6.yaml` with other flags, planned
on the accelerator that the driver tells before it is trained. Seconds are medians over the steps after the tenth, GiB
the allocator's peak. A row that needs more GPUs than there are is skipped by name. `--only NAME ...` takes some rows;
`--list` shows them all; `--gpu FILE` plans with what `fivefold bench` measured; `--planned` trains nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from layouts import HERE, Row, measure

from fivefold import Run, plan
from fivefold.plan.forecast import Forecast
from fivefold.plan.memory.peak import GIB

VOCABULARIES = {"dense16.yaml": 128_256, "llama8b.yaml": 128_256, "moe6.yaml": 151_936}
"""Of the random tokens of each run file."""
BF16 = ("--precision.master", "bf16", "--precision.moments", "bf16", "--precision.reduce", "bf16")
TWO = ("--batch.global_size", "2")
PIPELINE = ("--parallel.pp", "2", "--data.seq_len", "4096", "--batch.global_size", "8")
LONG = ("--data.seq_len", "131072", "--model.context", "131072", "--recompute.mode", "full")
LLAMA, MOE = "llama8b.yaml", "moe6.yaml"
STEPS = 16


def whole_host(gpus: int) -> Iterator[Row]:
    """Layouts of dense16, of Llama 3 8B and of a deeper moe6 on all GPUs of a host."""

    def row(name: str, *flags: str, size: int = gpus, file: str = LLAMA) -> Row:
        return Row(f"{name}-{gpus}", gpus, ("--batch.global_size", str(size), *flags), file)

    def degrees(**axes: int) -> tuple[str, ...]:
        return tuple(word for axis, degree in axes.items() for word in (f"--parallel.{axis}", str(degree)))

    yield row("dense-zero2", *degrees(zero=2), file="dense16.yaml")
    yield row("llama8b-zero2")
    yield row("llama8b-zero3", *degrees(zero=3))
    yield row("llama8b-tp2-zero2", *degrees(tp=2))
    yield row("llama8b-tp4-pp2" if gpus == 8 else "llama8b-tp2-pp2", *degrees(tp=gpus // 2, pp=2))
    yield row("llama8b-pp4-zb-v", *degrees(pp=4, chunks=2), "--parallel.schedule", "zb-v", size=2 * gpus)
    yield row("llama8b-cp4-131k", *degrees(cp=4), *LONG, size=gpus // 4)
    if gpus == 8:
        yield row("llama8b-tp2-cp2-pp2", *degrees(tp=2, cp=2, pp=2))
    yield row(f"experts-24-layers-ep{gpus}", "--model.layers", "24", *degrees(ep=gpus), size=2 * gpus, file=MOE)


ROWS = (
    Row("dense", 1),
    Row("dense-selective", 1, ("--recompute.mode", "selective")),
    Row("dense-full", 1, ("--recompute.mode", "full")),
    Row("dense-two-microbatches", 1, TWO),
    Row("dense-two-short", 1, ("--data.seq_len", "4096", "--batch.global_size", "2", "--batch.micro_size", "2")),
    Row("dense-16k-full", 1, ("--data.seq_len", "16384", "--model.context", "16384", "--recompute.mode", "full")),
    Row("dense-bf16-states", 1, BF16),
    Row("dense-offload", 1, ("--offload", '["activations"]')),
    Row("dense-offload-optimizer", 1, ("--offload", '["optimizer"]')),
    Row("dense-offload-both", 1, ("--offload", '["optimizer", "parameters"]')),
    Row("dense-tied", 1, ("--model.tied", "true")),
    Row("experts", 1, file=MOE),
    Row("experts-full", 1, ("--recompute.mode", "full"), MOE),
    Row("experts-two-microbatches", 1, ("--batch.global_size", "4"), MOE),
    Row("dense-zero2", 2, ("--parallel.zero", "2", *TWO)),
    Row("dense-zero3", 2, ("--parallel.zero", "3", *TWO)),
    Row("dense-tp2", 2, ("--parallel.tp", "2", *TWO, "--batch.micro_size", "2")),
    Row("dense-1f1b", 2, PIPELINE),
    Row("dense-zb-v", 2, (*PIPELINE, "--parallel.schedule", "zb-v", "--parallel.chunks", "2")),
    Row("experts-ep2", 2, ("--parallel.ep", "2", "--batch.global_size", "4"), MOE),
    *(row for gpus in (4, 8) for row in whole_host(gpus)),
)


def planned(row: Row, gpu: str) -> Forecast:
    """The forecast of a row."""
    flags = [*row.flags, "--gpu", gpu, "--gpus", str(row.gpus), "--model.vocab", str(VOCABULARIES[row.file])]
    return plan(Run.load(HERE / row.file, flags)).forecast()


Pair = tuple[float, float]
"""A figure as it was planned, and as it was measured."""


def pairs(row: Row, said: Forecast, found: dict[str, float]) -> tuple[Pair, Pair]:
    """Tokens/s a GPU, and GiB."""
    speed, gib = said.step.tokens_per_s / row.gpus, said.memory.worst.allocated / GIB
    return (speed, found["tok_per_s_gpu"]), (gib, found["gib"])


def line(row: Row, speed: Pair, gib: Pair) -> str:
    """A line of the table."""
    cells = [
        f"{one:{how}} | {other:{how}} | {one / other - 1:+.1%}" for (one, other), how in ((speed, ",.0f"), (gib, ".1f"))
    ]
    return f"| {row.name} | {row.gpus} | {' | '.join(cells)} |"


def planned_line(row: Row, said: Forecast) -> str:
    """A line of a table of plans alone."""
    speed, gib = said.step.tokens_per_s / row.gpus, said.memory.worst.allocated / GIB
    return f"| {row.name} | {row.gpus} | {speed:,.0f} | {said.step.mfu:.1%} | {said.step.bubble:.1%} | {gib:.1f} |"


def main() -> None:
    """Plan, train, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--planned", action="store_true", help="the plans alone, for a --gpu")
    parser.add_argument("--gpu", default="auto", help="what the plan is for; by default what is here")
    parser.add_argument("--out", type=Path, default=Path("runs/predictions"))
    arguments = parser.parse_args()
    rows = [row for row in ROWS if not arguments.only or row.name in arguments.only]
    if arguments.list:
        print("\n".join(f"{row.name:<25} {row.gpus} GPUs  {row.file} {' '.join(row.flags)}" for row in rows))
        return
    if arguments.planned:
        print("\n".join(planned_line(row, planned(row, arguments.gpu)) for row in rows))
        return
    print("| run | GPUs | tokens/s a GPU, planned | measured | error | GiB, planned | measured | error |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    errors = []
    for row in rows:
        if row.gpus > torch.cuda.device_count():
            print(f"| {row.name} | {row.gpus} | skipped: {torch.cuda.device_count()} here | | | | | |", flush=True)
            continue
        said = planned(row, arguments.gpu)
        data = arguments.out / f"tokens-{VOCABULARIES[row.file]}"
        make = [str(HERE / "random_tokens.py"), str(data), "--vocab", str(VOCABULARIES[row.file])]
        subprocess.run([sys.executable, *make], check=True, stdout=subprocess.DEVNULL)
        both = pairs(row, said, measure(row, data, arguments.out, STEPS))
        print(line(row, *both), flush=True)
        errors.append([abs(one / other - 1) for one, other in both])
    if errors:
        for name, each in zip(("tokens/s", "memory"), zip(*errors, strict=True), strict=True):
            print(f"{name}: mean error {statistics.fmean(each):.1%}, largest {max(each):.1%}")


if __name__ == "__main__":
    main()
