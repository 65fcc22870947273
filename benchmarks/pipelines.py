"""Measures pipeline schedules of one model on this machine's GPUs: `python benchmarks/pipelines.py`.

The model is that of `dense16.yaml` at 4,096 tokens, one sequence a microbatch; the tokens are random. Beside each row's
speed stands its bubble, measured in one step and simulated with the times of that step, and the memory of the fullest
rank beside the activations that simulation gives it. Figures are medians over the steps after the first ten (after
the first, of few).
`--only NAME ...` takes some rows; `--list` shows them all.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from layouts import HERE, Row, measure

from fivefold.pipeline.measured import PIPELINE_FILE, Measured
from fivefold.pipeline.simulate import simulate

BF16 = ("--precision.master", "bf16", "--precision.moments", "bf16", "--precision.reduce", "bf16")
STATES = {"fp32": (), "bf16": BF16}
CHUNKS = {"1f1b": 1, "zb-h1": 1, "zb-h2": 1, "interleaved": 2, "zb-v": 2, "auto": 2}


def rows_of(ranks: int) -> list[Row]:
    """Each schedule with 4 and with 8 microbatches a rank, in both formats of the states."""
    return [
        Row(
            f"{schedule}-m{microbatches}-{name}",
            ranks,
            (
                *("--parallel.pp", str(ranks), "--parallel.schedule", schedule, "--parallel.chunks", str(chunks)),
                *("--data.seq_len", "4096", "--batch.global_size", str(microbatches), *flags),
            ),
        )
        for microbatches in (4 * ranks, 8 * ranks)
        for name, flags in STATES.items()
        for schedule, chunks in CHUNKS.items()
    ]


@dataclass(frozen=True)
class Bubbles:
    """Of the step that a run measured."""

    measured: float
    simulated: float
    peak: list[float]
    """Simulated activations by rank."""

    @classmethod
    def of(cls, folder: Path) -> Bubbles:
        """What the record in a run's folder says."""
        record = Measured.load(folder / PIPELINE_FILE)
        timeline = simulate(record.schedule, record.times())
        return cls(record.bubble, timeline.bubble, list(timeline.peak))


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="pipeline ranks, one GPU each")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/pipelines"))
    arguments = parser.parse_args()
    rows = [row for row in rows_of(arguments.ranks) if not arguments.only or row.name in arguments.only]
    if arguments.list:
        print("\n".join(f"{row.name:<20} {row.gpus} GPUs  {' '.join(row.flags)}" for row in rows))
        return
    data = arguments.out / "tokens"
    subprocess.run([sys.executable, str(HERE / "random_tokens.py"), str(data)], check=True)
    print("| schedule | tokens/s a GPU | MFU | bubble | simulated | peak GiB | activations by rank |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for row in rows:
        if row.gpus > torch.cuda.device_count():
            print(f"| {row.name} | skipped: {torch.cuda.device_count()} GPUs here | | | | | |", flush=True)
            continue
        found = measure(row, data, arguments.out, arguments.steps)
        bubbles = Bubbles.of(arguments.out / row.name)
        cells = (
            row.name,
            f"{found['tok_per_s_gpu']:,.0f}",
            f"{found['mfu']:.1%}",
            f"{bubbles.measured:.3f}",
            f"{bubbles.simulated:.3f}",
            f"{found['gib']:.1f}",
            ", ".join(f"{peak:.3g}" for peak in bubbles.peak),
        )
        print(f"| {' | '.join(cells)} |", flush=True)
        print(json.dumps({"row": row.name, **found}), file=sys.stderr)


if __name__ == "__main__":
    main()
