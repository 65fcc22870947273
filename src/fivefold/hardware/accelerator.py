"""One kind of accelerator as numbers: what it can do at most, what it was measured to do, and who says so.

Rates are in plain units (FLOP/s, bytes, bytes/s, watts), whatever the file they came from was written in. Imports no
torch and knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fivefold.errors import UserError


@dataclass(frozen=True)
class Product:
    """A matrix product (m, k) x (k, n) that was timed."""

    format: str
    m: int
    n: int
    k: int
    rate: float
    """FLOP/s, each product and sum counted."""


@dataclass(frozen=True)
class Collective:
    """A collective that was timed."""

    kind: str
    ranks: int
    bytes: float
    """As `fivefold.plan.time.network` counts them."""
    seconds: float


@dataclass(frozen=True)
class Measured:
    """What `fivefold bench` found on one machine. An empty part was not measured."""

    copy: float | None = None
    """bytes/s of a copy inside the memory, what is read and what is written both counted."""
    host: Mapping[str, float] = field(default_factory=dict)
    """bytes/s between pinned CPU memory and the accelerator: "to", "from"."""
    network: float | None = None
    """bytes/s in one direction between nodes of one accelerator, while the others of its node do the same."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s of causal attention, the masked half not counted: "forward", "backward"."""
    attention_format: str = "bf16"
    """In which attention was timed."""
    products: Sequence[Product] = ()
    collectives: Sequence[Collective] = ()
    """Of the ranks of one node."""


@dataclass(frozen=True)
class Accelerator:
    """One kind of accelerator. A rate is a dense one: sparsity is not counted."""

    name: str
    driver_names: tuple[str, ...]
    """Patterns (`H100 PCIe*`) of the name that the driver gives, its vendor left out."""
    family: str
    """Kinds whose kernels are equally good: A100 (A800 too), H100 (H800 and H200 too), Blackwell, and others."""
    peak: Mapping[str, float]
    """FLOP/s at most by format: bf16 (and fp16), fp8, fp4, fp32; a format that is not there is not supported."""
    matmul: Mapping[str, float]
    """Best FLOP/s of a matrix product that anyone measured, by format; may be empty."""
    memory: float
    """bytes in all, as the driver reports them: of an H100 with "80 GB" that is 85.5e9."""
    nominal_memory: float
    """bytes as sold: 80e9."""
    bandwidth: float
    """bytes/s of the memory at most."""
    link: float
    """bytes/s in one direction of the links that join accelerators (NVLink); 0 if there are none but PCIe."""
    pair: float
    """bytes/s of `link` that two alone have: all of it through a switch, a share of it in a mesh."""
    domain: int
    """Accelerators that the links join."""
    per_node: int
    """Accelerators of a usual node."""
    pcie: float
    """bytes/s to the host, one direction: PCIe, or NVLink-C2C where the host has it."""
    nic: float
    """bytes/s in one direction of the usual network, for one accelerator; 0 if not known."""
    watts: float | None
    """At most."""
    sources: tuple[str, ...]
    confidence: Mapping[str, str]
    """By key of the catalogue: measured, driver, datasheet, source (a public table), unchecked, or given (yours)."""
    notes: str = ""
    measured: Measured | None = None

    @property
    def spans_nodes(self) -> bool:
        """Whether its links join more than the accelerators of a node."""
        return self.domain > self.per_node

    def peak_of(self, format: str) -> float:
        """FLOP/s at most of products in `format`; bf16 and fp16 are as fast as each other where both are there.

        Raises UserError if the accelerator cannot multiply in this format.
        """
        twin = {"bf16": None, "fp16": "bf16"}.get(format)
        rate = self.peak.get(format) or (self.peak.get(twin) if twin else None)
        if rate is None:
            raise UserError(
                f"{self.name} has no products in {format} (it has {', '.join(self.peak)}); choose another "
                "precision.compute or precision.linear"
            )
        return rate

    def matmul_of(self, format: str) -> float | None:
        """FLOP/s that a product in `format` was measured to reach; None if nobody did."""
        return self.matmul.get(format) or (self.matmul.get("bf16") if format == "fp16" else None)
