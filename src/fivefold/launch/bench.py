"""`fivefold bench`: measure the accelerators of this machine, or of all machines that a launcher gave a rank.

It starts one worker a GPU where there are several, as training does, so that what they exchange is measured too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fivefold.errors import UserError
from fivefold.hardware.accelerator import Accelerator
from fivefold.hardware.entry import entry_of, write_entry
from fivefold.launch.environment import is_worker
from fivefold.launch.local import run_workers, visible_gpus
from fivefold.outputs import check_file

if TYPE_CHECKING:
    import torch


def start_bench(out: Path | None, nproc: int | None, as_json: bool) -> int:
    """Measure, as a worker, alone, or by starting workers; the exit code. Writes the entry to `out` if that is given.

    Raises UserError if `out` cannot be written, before anything is measured.
    """
    if out is not None:
        _check(out)
    count = nproc or max(1, visible_gpus())
    if count > 1 and not is_worker("auto"):
        flags = [*(["--out", str(out)] if out else []), *(["--json"] if as_json else [])]
        return run_workers(["bench", *flags], count)
    from fivefold.hardware.bench import bench

    with _ranks() as (device, rank):
        found = bench(device)
        if rank == 0:
            if out is not None:
                write_entry(out, found.accelerator)
            if as_json:
                click.echo(json.dumps(entry_of(found.accelerator), indent=2))
            else:
                click.echo("\n".join(lines(found.accelerator, found.known, found.backend)))
            for note in found.notes:
                click.echo(note, err=True)
            if out is not None:
                click.echo(f"{out} holds the entry: `fivefold plan run.yaml --gpu {out}` plans with it", err=True)
    return 0


@contextmanager
def _ranks() -> Iterator[tuple[torch.device, int]]:
    """This process's device and rank, joined with the others where a launcher started several."""
    import torch
    import torch.distributed as dist

    if not is_worker("auto"):
        yield torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"), 0
        return
    from fivefold.parallel.mesh import joined

    with joined() as device:
        yield device, dist.get_rank()


def _check(out: Path) -> None:
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out}: cluster.gpu takes a name that ends in .yaml for a file; call it {out.name}.yaml")
    check_file(out)


def lines(found: Accelerator, known: Accelerator | None, backend: str) -> list[str]:
    """What was measured, one line each, and the share of what the catalogue has as the most there can be."""
    measured = found.measured
    assert measured is not None, "a bench measures"
    rows = [f"{found.name.removesuffix('-measured')}: {'in' if known else 'not in'} the catalogue"]

    def row(what: str, rate: float, unit: str, scale: float, most: float | None) -> None:
        share = f"{rate / most:6.0%} of {most / scale:,.4g}" if most else ""
        rows.append(f"{what:<44} {rate / scale:>10,.4g} {unit:<8} {share}".rstrip())

    for each in measured.products:
        peak = known.peak.get(each.format) if known else None
        row(f"{each.format} product {each.m} x {each.n} x {each.k}", each.rate, "TFLOP/s", 1e12, peak)
    for direction, rate in measured.attention.items():
        row(
            f"causal attention, {direction} ({backend})",
            rate,
            "TFLOP/s",
            1e12,
            known.peak.get("bf16") if known else None,
        )
    if measured.copy:
        row("copy in memory, read and written", measured.copy, "TB/s", 1e12, known.bandwidth if known else None)
    for direction, rate in measured.host.items():
        row(f"copy {direction} the host", rate, "GB/s", 1e9, known.pcie if known else None)
    for swap in measured.collectives:
        what = f"{swap.kind} of {swap.bytes / 2**20:g} MiB on {swap.ranks} ranks"
        rows.append(f"{what:<44} {swap.seconds * 1e3:>10,.4g} ms       {swap.bytes / swap.seconds / 1e9:,.4g} GB/s")
    if measured.network:
        row("between nodes, one direction", measured.network, "GB/s", 1e9, known.nic if known else None)
    return rows
