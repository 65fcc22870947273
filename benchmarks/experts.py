"""Measures a model with experts on this machine's GPUs: `python benchmarks/experts.py`.

The model is that of `moe6.yaml`, the tokens are random. `real` rows route as the router says; `even` rows force every
expert to have equally many tokens, as published figures often do. A row that needs more GPUs than there are is skipped
by name. Figures are medians over the steps after the first ten. `--split` adds, of one step, the device's time by what
it did; `--only NAME ...` takes some rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PROFILED_STEP = 20
KINDS: dict[str, tuple[str, ...]] = {
    "routing": (
        "fivefold.model.moe.choose",
        "fivefold.model.moe.sort_by_expert",
        "fivefold.model.moe.wide_linear",
        "fivefold.parallel.expert.visits",
        "fivefold.parallel.expert.arrived",
        "fivefold.parallel.expert._itinerary",
    ),
    "rows moved": (
        "fivefold.kernels.permute.gather_rows",
        "fivefold.kernels.permute.sum_rows",
        "fivefold.kernels.expert_feed_forward.gather_rows",
        "fivefold.kernels.expert_feed_forward.sum_rows",
        "fivefold.parallel.expert.gather_rows",
        "fivefold.parallel.expert.sum_rows",
    ),
    "grouped products": (
        "fivefold.kernels.expert_feed_forward.grouped_multiply",
        "fivefold.kernels.expert_feed_forward.grouped_multiply_transposed",
        "fivefold.kernels.expert_feed_forward.grouped_weight_gradient",
        "fivefold.parallel.accumulation.add_grouped_weight_gradient",
    ),
    "gated activation": (
        "fivefold.kernels.expert_feed_forward.gated_swiglu",
        "fivefold.kernels.expert_feed_forward.gated_swiglu_backward",
    ),
}
"""Functions by what they do. Of routing, forward alone."""
UPDATE = "Optimizer.step"
"""How torch's own range around an optimizer's step begins."""


@dataclass(frozen=True)
class Row:
    """One layout."""

    name: str
    gpus: int
    even: bool = False
    flags: tuple[str, ...] = ()


EP2 = ("--parallel.ep", "2", "--batch.global_size", "4")
ROWS = (
    Row("one-real", 1),
    Row("one-even", 1, even=True),
    Row("one-real-full", 1, flags=("--recompute.mode", "full")),
    Row("ep2-real", 2, flags=EP2),
    Row("ep2-even", 2, even=True, flags=EP2),
)


def measure(row: Row, data: Path, out: Path, steps: int, split: bool) -> dict[str, Any]:
    """Tokens/s a GPU, MFU, the worst layer's load and the peak in GiB of one row."""
    flags = {"name": row.name, "out": out, "data.train.0.path": data, "steps": steps}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    worker = [str(HERE / "experts.py"), "--as-worker", "even" if row.even else "real", "split" if split else "whole"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(row.gpus), *worker]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} | os.environ
    subprocess.run([*command, *words, *row.flags], env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / row.name / "metrics.jsonl").read_text().splitlines()]
    steady = [line for line in lines if line["step"] > 10 and abs(line["step"] - PROFILED_STEP) > 1]
    medians = {key: statistics.median(line[key] for line in steady) for key in ("tok_per_s_gpu", "mfu", "moe_load_max")}
    waited = [line["moe_exchange_s"] for line in steady if "moe_exchange_s" in line]
    exchange = {"exchange_ms": 1000 * statistics.median(waited)} if waited else {}
    return medians | exchange | {"gib": lines[-1]["mem_peak_gib"]}


def work(routing: str, split: str, flags: list[str]) -> None:
    """Be a worker of `fivefold train`, with what the row wants otherwise."""
    if routing == "even":
        force_even_loads()
    if split == "split":
        split_a_step()
    from fivefold.cli import main as command

    command(["train", str(HERE / "moe6.yaml"), "--restart", *flags])


def force_even_loads() -> None:
    """Send the tokens to the experts in turn, whatever the router says."""
    import fivefold.model.moe as room

    right = room.choose

    def even(logits_te: torch.Tensor, bias_e: torch.Tensor | None, moe: Any) -> Any:
        choice = right(logits_te, bias_e, moe)
        turns = torch.arange(logits_te.shape[0] * moe.top_k, device=logits_te.device)
        experts_tk = turns.view(-1, moe.top_k) % moe.experts
        return choice._replace(experts_tk=experts_tk, gates_tk=choice.probabilities_te.gather(-1, experts_tk))

    room.choose = even


def split_a_step() -> None:
    """Profile one step, and print the device's time by kind on standard error."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    import fivefold.train.loop as loop

    for kind, names in KINDS.items():
        for name in names:
            _label(name, kind)
    right, calls = loop.train_step, []

    def profiled(*arguments: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) != PROFILED_STEP:
            return right(*arguments, **options)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            result = right(*arguments, **options)
            torch.cuda.synchronize()
        kernels = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
        total = sum(e.device_time_total for e in kernels) / 1000
        labelled = dict.fromkeys((*KINDS, "update"), 0.0)
        for each in profiler.key_averages():
            kind = "update" if each.key.startswith(UPDATE) else each.key
            if kind in labelled and each.device_type == DeviceType.CUDA:  # from a range's first kernel to its last
                labelled[kind] += each.self_device_time_total / 1000
        labelled["exchanges"] = sum(e.device_time_total for e in kernels if "SendRecv" in e.name) / 1000
        labelled["the rest"] = total - sum(labelled.values())
        print("  ".join(f"{kind} {ms:.1f} ms" for kind, ms in labelled.items()), file=sys.stderr, flush=True)
        return result

    loop.train_step = profiled


def _label(name: str, kind: str) -> None:
    """Let a function's time on the device be known by its kind."""
    module, attribute = name.rsplit(".", 1)
    holder = import_module(module)
    right: Callable[..., Any] = getattr(holder, attribute)

    @wraps(right)
    def labelled(*arguments: Any, **options: Any) -> Any:
        with torch.profiler.record_function(kind):
            return right(*arguments, **options)

    setattr(holder, attribute, labelled)


def main() -> None:
    """Measure and print a Markdown table."""
    if sys.argv[1:2] == ["--as-worker"]:
        work(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS])
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("runs/experts"))
    arguments = parser.parse_args()
    data = arguments.out / "tokens"
    tokens = [sys.executable, str(HERE / "random_tokens.py"), str(data), "--vocab", "151936"]
    subprocess.run(tokens, check=True)
    print("| row | GPUs | tokens/s a GPU | MFU | max / mean load | waiting for rows, ms | peak GiB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for row in ROWS:
        if arguments.only and row.name not in arguments.only:
            continue
        if row.gpus > torch.cuda.device_count():
            print(f"| {row.name} | {row.gpus} | skipped: {torch.cuda.device_count()} here | | | | |", flush=True)
            continue
        found = measure(row, data, arguments.out, arguments.steps, arguments.split)
        waiting = f"{found['exchange_ms']:.1f}" if "exchange_ms" in found else ""
        cells = [row.name, str(row.gpus), f"{found['tok_per_s_gpu']:,.0f}", f"{found['mfu']:.1%}"]
        cells += [f"{found['moe_load_max']:.2f}", waiting, f"{found['gib']:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
