"""What a measured accelerator reaches, in place of what its family was fitted to reach.

`fivefold bench` times products, attention and copies; here they become the same constants that the planner fits for a
family, so that the same formulas read them. An accelerator whose file has none keeps its family's. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import median

from fivefold.hardware.accelerator import Accelerator
from fivefold.plan.constants import Family

LARGE = 1e11
"""FLOPs of a product from which it says what a large one reaches; a smaller one says more of its launch."""
STATED_SHAPE = (8192.0, 8192.0, 8192.0)
"""Taken for that of a best rate that a file gives without a shape."""


def family_as_measured(
    family: Family, accelerator: Accelerator, format: str, ideal: Callable[[float, float, float], float]
) -> Family:
    """`family` with the shares of products in `format` and of copies that were measured, or that the user gave.

    `ideal` gives the FLOP/s of a product (m, n, k) if its large ones reached all of the peak.
    """
    shares = _product_shares(accelerator, format, ideal)
    if shares:
        family = replace(family, matmul=median(shares))
    if accelerator.measured is not None and accelerator.measured.copy:
        family = replace(family, bandwidth=accelerator.measured.copy / accelerator.bandwidth)
    return family


def _product_shares(
    accelerator: Accelerator, format: str, ideal: Callable[[float, float, float], float]
) -> list[float]:
    products = accelerator.measured.products if accelerator.measured else ()
    timed = [each.format for each in products]
    stands_for = next((name for name in _as_fast(accelerator, format) if name in timed), format)
    fitting = [each for each in products if each.format == stands_for]
    large = [each for each in fitting if 2 * each.m * each.n * each.k >= LARGE]
    if fitting:
        return [each.rate / ideal(each.m, each.n, each.k) for each in large or fitting]
    best = accelerator.matmul_of(format)
    if best is not None and accelerator.confidence.get("matmul_tflops") == "given":
        return [best / ideal(*STATED_SHAPE)]
    return []


def _as_fast(accelerator: Accelerator, format: str) -> list[str]:
    """The formats whose measured rates hold for `format`: itself, and the other one of 16 bits if it is as fast."""
    twin = {"bf16": "fp16", "fp16": "bf16"}.get(format)
    peak = accelerator.peak_of(format)
    return [format] if twin is None or accelerator.peak.get(twin, peak) != peak else [format, twin]


def measured_attention(accelerator: Accelerator, format: str, backward: float) -> float | None:
    """FLOP/s of causal attention in `format`, forward and backward together, which has `backward` times the forward's
    products. None if it was not measured in it.
    """
    measured = accelerator.measured
    if measured is None or measured.attention_format not in _as_fast(accelerator, format):
        return None
    rates = measured.attention
    if not {"forward", "backward"} <= set(rates):
        return None
    return (1 + backward) / (1 / rates["forward"] + backward / rates["backward"])
