"""How long an operation takes on an accelerator with a generation of kernels: a roofline whose rates depend on shape.

A matrix product takes the longer of its arithmetic, at a rate that falls with ragged tiles, a last wave that leaves
multiprocessors idle, and few columns, and of the movement of its operands. Other operations move bytes. Nothing is
faster than the peak of the format that it is computed in. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from math import ceil, sqrt

from fivefold.config.run import Run
from fivefold.hardware.accelerator import Accelerator
from fivefold.pipeline.layer_bytes import BYTES
from fivefold.plan.constants import Constants
from fivefold.plan.software import UNFUSED, Software
from fivefold.plan.time.formats import NARROW, compute_format
from fivefold.plan.time.measured_rates import family_as_measured, measured_attention
from fivefold.plan.time.work import Operation, Shape

MULTIPROCESSORS = {"A100": 108, "H100": 132, "Blackwell": 148}
"""Of a family's accelerators (datasheets); 132 elsewhere."""
WITHOUT_TILES = ("CPU",)
"""Families whose products have no multiprocessors to fill: they run at one rate, whatever their shape."""
TILES = ((128, 256, 1.0), (128, 128, 0.93), (64, 128, 0.8))
"""Tiles that a library can cut a product into, with the share of the best rate that each allows."""
WATTS = {"A100": 400, "H100": 700, "Blackwell": 1000}
"""At which a family's accelerators hold the clocks that its constants are for."""
FLASH_BACKWARD = 2.5
"""Attention's backward computes the scores again: five products for the forward's two."""
BACKWARD_PASSES = 2.0
"""Bytes that the backward of a pointwise operation moves, as a multiple of its forward's."""


class Rates:
    """Seconds of operations."""

    def __init__(self, run: Run, accelerator: Accelerator, software: Software, constants: Constants) -> None:
        generation = constants.generations[software.generation]
        compute = compute_format(run)
        self._peak = accelerator.peak_of(compute) * _clock(accelerator)
        self._tiled = accelerator.family not in WITHOUT_TILES
        self._sms = MULTIPROCESSORS.get(accelerator.family, 132)
        fitted = constants.family(accelerator.family)
        fitted = fitted if self._tiled else replace(fitted, depth=0.0)
        family = family_as_measured(fitted, accelerator, compute, partial(self._ideal, fitted.depth))
        self.family, self.generation = family, generation
        self._wide = self._peak * family.matmul
        self._narrow = self._wide
        self._most = self._narrow_most = accelerator.peak_of(compute)
        self._width = self._narrow_width = BYTES[run.precision.compute]
        if (format := NARROW.get(run.precision.linear)) is not None:
            self._narrow_most = accelerator.peak_of(format)
            gain = self._narrow_most / self._most
            self._narrow = self._wide * (1 + (gain - 1) * generation.narrow)
            self._narrow_width = 1
        self.bandwidth = accelerator.bandwidth * family.bandwidth
        self._attention = self._alone = self._peak * generation.attention_of(accelerator.family)
        self._scores = self.bandwidth * generation.attention_of(accelerator.family)
        self._unfused = software.generation == UNFUSED
        if software.name == "fivefold":
            found = measured_attention(accelerator, compute, FLASH_BACKWARD) or self._attention
            self._attention = min(found, self._most)
            self._alone = min(measured_attention(accelerator, compute, backward=0.0) or self._alone, self._most)
        self._odd = generation.odd_heads if self._unfused and _odd_heads(run) else 1.0

    def forward(self, operation: Operation) -> float:
        """Seconds of an operation's forward."""
        kind = operation.kind
        if kind == "product":
            assert operation.shape is not None
            return self.product(operation.shape, operation.linear, operation.part == "attention")
        if kind == "attention":
            return self._attention_seconds(operation, 1.0)
        routing = self.generation.routing if operation.name == "dispatch" else 0.0
        return self.moving(operation.bytes) + self.generation.launch + routing

    def alone(self, operation: Operation) -> float:
        """The same where no backward follows: attention has the rate that was measured of its forward."""
        if operation.kind == "attention" and not self._unfused:
            return operation.flops / self._alone + self.generation.launch
        return self.forward(operation)

    def backward(self, operation: Operation) -> tuple[float, float]:
        """Seconds of the gradient of an operation's input, and of its weight."""
        kind = operation.kind
        if kind == "product":
            assert operation.shape is not None
            m, n, k, count = operation.shape
            core = operation.part == "attention"
            of_input = self.product(Shape(m, k, n, count), operation.linear, core)
            of_weight = self.product(Shape(n, k, m, count), operation.linear, core)
            return (of_input + of_weight, 0.0) if core else (of_input, of_weight)
        if kind == "attention":
            return self._attention_seconds(operation, FLASH_BACKWARD), 0.0
        routing = self.generation.routing if operation.name == "dispatch" else 0.0
        return BACKWARD_PASSES * self.moving(operation.bytes) + self.generation.launch + routing, 0.0

    def moving(self, bytes: float) -> float:
        """Seconds in which pointwise operations move what the simplest kernels would move `bytes` for."""
        return bytes * self.generation.pointwise / self.bandwidth

    def product(self, shape: Shape, linear: bool, core: bool = False) -> float:
        """Seconds of a matrix product; `linear` those in the format of the linear layers, `core` those of attention."""
        m, n, k, count = shape
        rate, most = (self._narrow, self._narrow_most) if linear else (self._wide, self._most)
        width = self._narrow_width if linear else self._width
        reached = min(most, rate * self._shape_share(m, n, k, count, self.family.depth))
        arithmetic = 2 * m * n * k * count / reached
        moved = (width * (m + n) * k + self._width * m * n) * count / self.bandwidth
        seconds = max(arithmetic, moved) * (self._odd if core else 1.0)
        if linear and width < 2:
            seconds += self.moving(2.5 * m * k * count)
        return seconds + self.generation.launch

    def _ideal(self, depth: float, m: float, n: float, k: float) -> float:
        """FLOP/s of a product if large ones reached the peak."""
        return self._peak * self._shape_share(m, n, k, 1.0, depth)

    def _shape_share(self, m: float, n: float, k: float, count: float, depth: float) -> float:
        """What a product's shape leaves of the rate of a large one."""
        return filled(m, n, count, self._sms) * k / (k + depth) if self._tiled else 1.0

    def _attention_seconds(self, operation: Operation, backward: float) -> float:
        if self._unfused:
            passes = 1.0 if backward == 1.0 else BACKWARD_PASSES
            return passes * operation.bytes * self._odd / self._scores + self.generation.launch
        return backward * operation.flops / self._attention + self.generation.launch


@lru_cache(maxsize=65536)
def filled(m: float, n: float, count: float, multiprocessors: int) -> float:
    """The share of the multiprocessors' work that is not wasted, with the best of the tiles."""
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = ceil(m / rows) * ceil(n / columns) * count
        useful = m * n * count / (rows * columns)
        waves = ceil(tiles / multiprocessors)
        best = max(best, rate * useful / (waves * multiprocessors))
    return best


def _clock(accelerator: Accelerator) -> float:
    """The share of the family's clocks under a lower limit of power: products take what they get, and power rises with
    the clock and, through the voltage, with its square and more."""
    full = WATTS.get(accelerator.family)
    if full is None or accelerator.watts is None:
        return 1.0
    return min(1.0, sqrt(accelerator.watts / full))


def _odd_heads(run: Run) -> bool:
    """Heads a rank beyond 8 that 8 does not divide, of several sequences, or a head size that 8 does not divide.

    Batched products then run slowly."""
    heads = run.model.heads / run.parallel.tp
    return (run.batch.micro_size > 1 and heads > 8 and heads % 8 != 0) or run.model.head_size % 8 != 0
