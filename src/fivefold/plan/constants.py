"""Every fitted number of the planner, in one table whose size a test holds.

`benchmarks/fit_planner.py` finds them by making the errors on the published runs small, and writes them into
`constants.json` beside this file. At most five belong to a family of accelerators and at most six to a generation of
kernels; none belongs to a row, a source or a model. What is documented rather than fitted stands where it is used.
Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from fivefold.plan.software import UNFUSED

FILE = Path(__file__).with_name("constants.json")
"""The table: families and generations by name, each constant by its name."""

FAMILY_LIMIT, GENERATION_LIMIT = 5, 6
FITTED_FAMILIES = ("A100", "H100", "Blackwell")


@dataclass(frozen=True)
class Family:
    """What the accelerators of a family reach of their datasheets."""

    matmul: float
    """Share of the peak that a large 16-bit matrix product reaches at the clocks of a long run."""
    depth: float
    """Columns of a product at which half of that is reached: short products start and end often."""
    bandwidth: float
    """Share of the memory's bandwidth that a large copy reaches."""
    link: float
    """Share of the link's bandwidth that a large collective reaches."""
    nic: float
    """Share of the network's bandwidth that a large collective reaches."""


@dataclass(frozen=True)
class Generation:
    """What a generation of kernels makes of it. What a generation does not have is 0 and not counted."""

    attention: Mapping[str, float]
    """Share of the peak that causal attention's own products reach, by family; of unfused attention, the share of the
    memory's bandwidth with which its passes over the scores move."""
    pointwise: float
    """Bytes that pointwise operations move, as a multiple of what the simplest kernels would."""
    launch: float
    """Seconds that an operation takes beside its work."""
    overlap: float
    """Share of a communication that hides behind computation where the two can run at once."""
    narrow: float = 0.0
    """Share of the gain of 8-bit products over 16-bit ones that is realized."""
    routing: float = 0.0
    """Seconds in which a layer of experts chooses, sorts and waits for the host, in forward and again in backward."""
    odd_heads: float = 0.0
    """Of unfused attention: how many times longer it takes with a number or size of heads that kernels do not like."""
    gaps: float = 0.0
    """Bytes that the caching allocator of the time, whose segments cannot grow, reserved over those of its tensors."""
    earlier: Mapping[str, float] = field(default_factory=dict)
    """Of `attention`, what the generations before had, by family: no further constants."""

    def attention_of(self, family: str) -> float:
        """For a family without a figure, its own of the newest fused generation before, which newer kernels keep; else
        that of the family that is nearest in age."""
        known = {**self.earlier, **self.attention}
        if family in known:
            return known[family]
        order = {"A100": 0, "H100": 1, "Blackwell": 2}
        wanted = order.get(family, 1)
        nearest = min(self.attention, key=lambda known: abs(order[known] - wanted))
        return self.attention[nearest]


@dataclass(frozen=True)
class Constants:
    """The whole table."""

    families: Mapping[str, Family]
    generations: Mapping[str, Generation]

    def family(self, name: str) -> Family:
        """Accelerators of no fitted family are taken to reach as much of their datasheets as an H100."""
        return self.families.get(name, self.families["H100"])

    @property
    def gaps(self) -> float:
        """Reserved over allocated bytes where segments cannot grow; told by the one generation whose rows show it."""
        return max(generation.gaps for generation in self.generations.values())


@cache
def constants() -> Constants:
    """The shipped table."""
    return from_table(json.loads(FILE.read_text(encoding="utf-8")))


def from_table(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Constants:
    """The constants of a table as `constants.json` has it: attention's are named attention_FAMILY there."""
    return Constants(
        families={name: Family(**values) for name, values in table["families"].items()},
        generations=dict(_generations(table["generations"])),
    )


def _generations(table: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, Generation]]:
    """From the oldest on. What unfused attention reaches is a share of something else, and is not handed on."""
    earlier: dict[str, float] = {}
    for name, values in table.items():
        generation = _generation(values, dict(earlier))
        earlier |= {} if name == UNFUSED else generation.attention
        yield name, generation


def _generation(values: Mapping[str, float], earlier: Mapping[str, float]) -> Generation:
    attention = {name.removeprefix("attention_"): value for name, value in values.items() if "attention_" in name}
    others = {name: value for name, value in values.items() if "attention_" not in name}
    return Generation(attention, earlier=earlier, **others)
