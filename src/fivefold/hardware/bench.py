"""Measuring an accelerator's own rates, and the catalogue entry that comes of it. Imports torch.

What the catalogue knows of the device (peaks, memory, links, watts) stays, and what was measured is added to it. Of a
device that it does not know, what was measured stands for what a datasheet would say.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

import torch
import torch.distributed as dist

from fivefold.hardware import bench_compute, bench_exchange
from fivefold.hardware.accelerator import Accelerator, Measured, Product
from fivefold.hardware.catalogue import by_driver_name
from fivefold.hardware.entry import ROUNDING
from fivefold.hardware.node import ranks_of_node
from fivefold.hardware.stopwatch import Stopwatch

GPU_BUDGET_S, CPU_BUDGET_S = 0.7, 0.1
"""Seconds for each piece of work: about a minute in all, and a few seconds on a CPU."""


@dataclass(frozen=True)
class Findings:
    """What a bench found: the entry, and what should be known of it."""

    accelerator: Accelerator
    known: Accelerator | None
    """The catalogue's own entry of the device."""
    backend: str
    """Which of torch's attention kernels was timed."""
    notes: tuple[str, ...] = ()


def bench(device: torch.device, budget: float | None = None) -> Findings:
    """Measure the device, and what the ranks exchange if there is a process group; then all its ranks call this.

    `budget` is the seconds to spend on each piece of work.
    """
    together = dist.is_initialized() and dist.get_world_size() > 1
    standard = GPU_BUDGET_S if device.type == "cuda" else CPU_BUDGET_S
    watch = Stopwatch(device, standard if budget is None else budget, together)
    per_node = ranks_of_node(dist.get_world_size()) if together else 1
    products = bench_compute.products(watch)
    attention, backend = bench_compute.attention(watch)
    measured = Measured(
        copy=bench_compute.copy(watch),
        host=bench_compute.host_copies(watch),
        network=bench_exchange.network(watch, per_node) if together else None,
        attention=attention,
        attention_format=bench_compute.formats_of(device)[0],
        products=tuple(products),
        collectives=tuple(bench_exchange.collectives(watch, per_node)) if together else (),
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    known = by_driver_name(name)
    found, notes = entry_from(known or unknown(name, memory_of(device), per_node, measured), measured)
    return Findings(found, known, backend, tuple(notes))


def entry_from(base: Accelerator, measured: Measured) -> tuple[Accelerator, list[str]]:
    """An entry with what was measured over what was known, and what of the latter cannot be true of this device."""
    notes = []
    matmul = best_rates(measured.products)
    peak, bandwidth = matmul | dict(base.peak), base.bandwidth
    for format, rate in matmul.items():
        if rate > peak[format] * ROUNDING:
            notes.append(_more_than(base, f"products in {format}", rate / 1e12, peak[format] / 1e12, "TFLOP/s"))
            peak[format] = rate
    if measured.copy and measured.copy > bandwidth * ROUNDING:
        notes.append(_more_than(base, "a copy", measured.copy / 1e12, bandwidth / 1e12, "TB/s"))
        bandwidth = measured.copy
    found = replace(
        base,
        name=f"{base.name}-measured",
        peak=peak,
        matmul=dict(base.matmul) | matmul,
        bandwidth=bandwidth,
        nic=base.nic or measured.network or 0.0,
        sources=(*base.sources, _how_measured()),
        confidence=dict(base.confidence) | {"matmul_tflops": "measured"},
        measured=measured,
    )
    return found, notes


def _more_than(base: Accelerator, what: str, found: float, most: float, unit: str) -> str:
    return (
        f"{what}: {found:.4g} {unit} were measured, and {base.name} has {most:.4g} at most; this device is another "
        "one, and what was measured is taken for its most"
    )


def best_rates(products: Sequence[Product]) -> dict[str, float]:
    """The best FLOP/s of each format."""
    best: dict[str, float] = {}
    for each in products:
        best[each.format] = max(each.rate, best.get(each.format, 0.0))
    return best


def unknown(name: str, memory: float, per_node: int, measured: Measured) -> Accelerator:
    """An accelerator of which only what was measured is known. What joins the ranks of a node is taken for a link, as
    fast as the fastest exchange; on a CPU, where all goes through the memory, for PCIe."""
    rates = [
        each.bytes
        * {"all-reduce": 2 * (each.ranks - 1) / each.ranks, "send": 1.0}.get(each.kind, 1 - 1 / each.ranks)
        / each.seconds
        for each in measured.collectives
    ]
    fastest = max(rates, default=0.0)
    cpu = name.startswith("CPU")
    known = {"memory_mib": "driver", "bandwidth_tb_s": "measured", "pcie_gb_s": "measured", "link_gb_s": "measured"}
    return Accelerator(
        name=re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-"),
        driver_names=() if cpu else (re.sub(r"^(NVIDIA|AMD Instinct|AMD|Tesla) ", "", name),),
        family="CPU" if cpu else "other",
        peak={},
        matmul={},
        memory=memory,
        nominal_memory=memory,
        bandwidth=measured.copy or 0.0,
        link=0.0 if cpu else fastest,
        pair=0.0 if cpu else fastest,
        domain=1 if cpu or not fastest else per_node,
        per_node=per_node if per_node > 1 else 8,
        pcie=(fastest if cpu else max(measured.host.values(), default=0.0)) or measured.copy or 0.0,
        nic=measured.network or 0.0,
        watts=None,
        sources=(),
        confidence=known,
    )


def memory_of(device: torch.device) -> float:
    """bytes of the device's memory; of a CPU those of the machine."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _cpu_name() -> str:
    return f"CPU {platform.machine()} {torch.get_num_threads()} threads"


def _how_measured() -> str:
    system = f", CUDA {torch.version.cuda}" if torch.version.cuda and torch.cuda.is_available() else ""
    return f"fivefold bench, {date.today().isoformat()}, torch {torch.__version__}{system}"
