"""Which formats a run multiplies in, and so whose peak its rates are shares of. Imports no torch."""

from __future__ import annotations

from fivefold.config.run import Run

NARROW = {"fp8-block": "fp8", "fp8-tensor": "fp8", "fp4": "fp4"}
"""Formats of fewer than 16 bits that the linear layers can multiply in, by `precision.linear`."""


def compute_format(run: Run) -> str:
    """The format of attention and of all that is not in a narrower one; fp64 is taken to be as fast as fp32."""
    return {"fp64": "fp32"}.get(run.precision.compute, run.precision.compute)


def product_format(run: Run) -> str:
    """The format of the linear layers' products, of whose peak the MFU is a share."""
    return NARROW.get(run.precision.linear) or compute_format(run)
