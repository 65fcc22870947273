"""Accelerators by name: the peak rate of dense bf16 products, for model FLOPs utilization. Imports no torch.

Rates are the vendors' datasheets' (NVIDIA A100, H100, H200, H800, B200, B300, L40S), dense, without sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """One kind of GPU."""

    name: str
    driver_names: tuple[str, ...]  # parts of the name that the driver gives, the first that fits counts
    bf16_tflops: float  # dense peak


ACCELERATORS = (
    Accelerator("GB200", ("GB200",), 2500),
    Accelerator("GB300", ("GB300",), 2500),
    Accelerator("B200-SXM-180GB", ("B200",), 2250),
    Accelerator("B300-SXM-288GB", ("B300",), 2250),
    Accelerator("H200-SXM-141GB", ("H200",), 989),
    Accelerator("H800-SXM-80GB", ("H800",), 989),
    Accelerator("H100-PCIe-80GB", ("H100 PCIe",), 756),
    Accelerator("H100-SXM-80GB", ("H100",), 989),
    Accelerator("A800-SXM-80GB", ("A800",), 312),
    Accelerator("A100-SXM-80GB", ("A100",), 312),
    Accelerator("L40S", ("L40S",), 362),
)


def by_driver_name(name: str) -> Accelerator | None:
    """The accelerator that the driver calls `name`, such as "NVIDIA H200"; None if the catalogue lacks it."""
    return next((each for each in ACCELERATORS if any(part in name for part in each.driver_names)), None)
