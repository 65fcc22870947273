"""Measures layouts of one model on this machine's GPUs, each as a run of its own: `python benchmarks/layouts.py`.

The model is that of `dense16.yaml`, the tokens are random. A row that needs more GPUs than there are is skipped by
name. Figures are medians over the steps after the first ten (after the first, in rows of few steps). `--only NAME ...`
takes some rows; `--list` shows them all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
TWO = ("--batch.global_size", "2")
FOUR = ("--batch.global_size", "4")
ULYSSES = ("--parallel.cp_method", "ulysses")
LONG = ("--recompute.mode", "full", "--model.context", "262144")


@dataclass(frozen=True)
class Row:
    """One layout."""

    name: str
    gpus: int
    flags: tuple[str, ...] = ()
    file: str = "dense16.yaml"


ROWS = (
    Row("one", 1),
    Row("one-selective", 1, ("--recompute.mode", "selective")),
    Row("one-full", 1, ("--recompute.mode", "full")),
    Row("zero1", 2, ("--parallel.zero", "1", *TWO)),
    Row("zero2", 2, ("--parallel.zero", "2", *TWO)),
    Row("zero3", 2, ("--parallel.zero", "3", *TWO)),
    Row("tp2", 2, ("--parallel.tp", "2", *TWO, "--batch.micro_size", "2")),
    Row("cp2-32k", 2, ("--parallel.cp", "2", "--data.seq_len", "32768", *LONG)),
    Row("cp2-32k-ulysses", 2, ("--parallel.cp", "2", *ULYSSES, "--data.seq_len", "32768", *LONG)),
    Row("cp2-262k", 2, ("--parallel.cp", "2", *ULYSSES, "--data.seq_len", "262144", *LONG, "--steps", "2")),
    Row("zero2-of-4", 4, ("--parallel.zero", "2", *FOUR)),
    Row("replicate2-shard2", 4, ("--parallel.replicate", "2", "--parallel.zero", "2", *FOUR)),
    Row("tp2-zero2", 4, ("--parallel.tp", "2", "--parallel.zero", "2", *FOUR, "--batch.micro_size", "2")),
    Row("tp4", 4, ("--parallel.tp", "4", *FOUR, "--batch.micro_size", "4")),
    Row("tp2-cp2-32k", 4, ("--parallel.tp", "2", "--parallel.cp", "2", "--data.seq_len", "32768", *LONG)),
    Row("cp4-131k", 4, ("--parallel.cp", "4", "--data.seq_len", "131072", *LONG, "--steps", "8")),
    Row("zero2-of-8", 8, ("--parallel.zero", "2", "--batch.global_size", "8")),
)


def measure(row: Row, data: Path, out: Path, steps: int = 20) -> dict[str, float]:
    """Tokens/s a GPU, MFU and the peak in GiB of one row."""
    flags = {"name": row.name, "out": out, "data.train.0.path": data, "nproc": row.gpus, "steps": steps}
    command = [sys.executable, "-m", "fivefold", "train", str(HERE / row.file), "--restart"]
    command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    command += row.flags
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(row.gpus)))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(devices.split(",")[: row.gpus])}
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / row.name / "metrics.jsonl").read_text().splitlines()]
    steady = lines[10:] if len(lines) > 15 else lines[1:]
    median = {key: statistics.median(line[key] for line in steady) for key in ("tok_per_s_gpu", "mfu")}
    return median | {"gib": lines[-1]["mem_peak_gib"]}


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/layouts"))
    arguments = parser.parse_args()
    rows = [row for row in ROWS if not arguments.only or row.name in arguments.only]
    if arguments.list:
        print("\n".join(f"{row.name:<20} {row.gpus} GPUs  {' '.join(row.flags)}" for row in rows))
        return
    data = arguments.out / "tokens"
    subprocess.run([sys.executable, str(HERE / "random_tokens.py"), str(data)], check=True)
    print("| layout | GPUs | tokens/s a GPU | of one GPU | MFU | peak GiB |\n|---|---|---|---|---|---|", flush=True)
    one = None
    for row in rows:
        if row.gpus > torch.cuda.device_count():
            print(f"| {row.name} | {row.gpus} | skipped: {torch.cuda.device_count()} here | | | |", flush=True)
            continue
        found = measure(row, data, arguments.out)
        one = found["tok_per_s_gpu"] if row.name == "one" else one
        share = "" if one is None else f"{found['tok_per_s_gpu'] / one:.1%}"
        rate, mfu = f"{found['tok_per_s_gpu']:,.0f}", f"{found['mfu']:.1%}"
        print(f"| {row.name} | {row.gpus} | {rate} | {share} | {mfu} | {found['gib']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
