"""How often machines fail: published rates by name, the time between failures of a job, and the spares that it needs.

Rates are failures of a job's nodes in 1,000 node-days, where a node is 8 GPUs; a cluster with other nodes is counted in
eights of its GPUs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import exp, inf, lgamma, log, sqrt
from typing import Any

from fivefold.errors import UserError
from fivefold.near import did_you_mean
from fivefold.plan.quantities import DAY, count, formula, fraction, not_negative, positive, time

NODE_GPUS = 8
"""GPUs of the nodes that all rates are stated for."""
REPAIR = DAY
"""Seconds that a replaced node is away, in the mean; assumed."""
SPARES_QUANTILE = 0.99
"""Of the number of nodes in repair at once that spares stand ready for."""


@dataclass(frozen=True)
class Failures:
    """A rate at which a job's nodes fail, all causes together."""

    name: str
    per_1000_node_days: float
    source: str
    spread: tuple[float, float] | None = None
    """The least and the greatest that the source states, where it states a range; the rate is its middle."""
    causes: Mapping[str, int] = field(default_factory=dict)
    """Counts by cause, where the source states them."""
    basis: str = "catalogued"

    def a_day(self, gpus: float) -> float:
        """Failures a day of a job on so many GPUs."""
        positive("the number of GPUs", gpus, "GPUs")
        return gpus / NODE_GPUS * self.per_1000_node_days / 1000

    def mttf(self, gpus: float) -> float:
        """Mean seconds between failures of a job on so many GPUs; infinite if nothing fails."""
        daily = self.a_day(gpus)
        return DAY / daily if daily else inf

    def expected(self, gpus: float, days: float) -> dict[str, float]:
        """Failures of a job on so many GPUs in so many days: `all`, and by cause where those are known."""
        not_negative("the number of days", days, "days")
        every = self.a_day(gpus) * days
        total = sum(self.causes.values())
        return {"all": every} | {cause: every * counted / total for cause, counted in self.causes.items()}

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self) | {"causes": dict(self.causes)}

    def explain(self, gpus: float) -> list[str]:
        """The time between failures of a job on so many GPUs, with its numbers."""
        spread = "" if self.spread is None else f", stated {count(self.spread[0])} to {count(self.spread[1])}"
        return [
            f"failure rate {self.name} = {count(self.per_1000_node_days)} per 1,000 node-days of {NODE_GPUS} GPUs"
            f"{spread}: {self.source}",
            formula(
                "time between failures",
                f"1 / (GPUs / {NODE_GPUS} x rate)",
                f"1,000 days / ({count(gpus)} / {NODE_GPUS} x {count(self.per_1000_node_days)})",
                time(self.mttf(gpus)),
            ),
        ]


LLAMA_3_CAUSES = {
    "GPU or NVLink": 148,
    "HBM": 72,
    "software": 54,
    "switch or cable": 35,
    "unplanned host maintenance": 32,
    "GPU SRAM": 19,
    "GPU system processor": 17,
    "NIC": 7,
    "hang": 7,
    "silent data corruption": 6,
    "thermal": 6,
    "SSD": 3,
    "power": 3,
    "others": 10,
}
"""Interruptions of Llama 3 405B in 54 days that were not planned (Dubey et al. 2024, table 5)."""

RATES = {
    rate.name: rate
    for rate in (
        Failures(
            "llama3",
            419 / (54 * 2048) * 1000,
            "Llama 3 405B, 419 interruptions in 54 days on 2,048 nodes of 8 H100 (Dubey et al. 2024, section 3.3.4)",
            causes=LLAMA_3_CAUSES,
        ),
        Failures("rsc1", 6.50, "Meta RSC-1, 16,000 A100 (Kokolis et al. 2024)"),
        Failures("rsc2", 2.34, "Meta RSC-2, 8,000 A100 (Kokolis et al. 2024)"),
        Failures("opt", 16.0, "OPT-175B, 992 A100 (Zhang et al. 2022), about"),
        Failures("bloom", 4.5, "BLOOM, 384 A100 (BigScience 2022)", spread=(3.0, 6.0)),
    )
}
"""Published rates by name."""


def failures_of(rate: str | float) -> Failures:
    """A published rate by its name, or a number of failures in 1,000 node-days. Raises UserError for neither."""
    if isinstance(rate, str):
        if rate not in RATES:
            raise UserError(
                f"no failure rate is named {rate!r}; {did_you_mean(rate, RATES)}known are {', '.join(RATES)}; or give "
                "a number of failures in 1,000 node-days"
            )
        return RATES[rate]
    not_negative("the failure rate", rate, "failures in 1,000 node-days of 8 GPUs")
    return Failures("given", float(rate), "given", basis="given")


def failures_of_mttf(hours: float, gpus: float) -> Failures:
    """The rate of a job on so many GPUs that fails once in so many hours. Raises UserError unless both are above 0."""
    positive("the time between failures", hours, "hours")
    positive("the number of GPUs", gpus, "GPUs")
    rate = 24 / hours / (gpus / NODE_GPUS) * 1000
    return Failures("given", rate, f"a failure each {count(hours)} h on {count(gpus)} GPUs, given", basis="given")


@dataclass(frozen=True)
class Spares:
    """Nodes of 8 GPUs that stand ready, so that the job seldom waits for a repair."""

    in_repair: float
    """Nodes in repair at once, in the mean."""
    quantile: float
    most_in_repair: int
    """Nodes in repair at once that are exceeded in a share of 1 - quantile of all moments only."""
    rack: int
    """Nodes of a rack, which fail together."""

    @property
    def nodes(self) -> int:
        """Spare nodes."""
        return self.most_in_repair + self.rack

    @property
    def gpus(self) -> int:
        """GPUs of the spare nodes."""
        return self.nodes * NODE_GPUS

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self) | {"nodes": self.nodes, "gpus": self.gpus}

    def explain(self) -> list[str]:
        """The formula with its numbers."""
        return [
            formula(
                "spare nodes",
                f"P{100 * self.quantile:g} of Poisson(nodes in repair) + a rack",
                f"P{100 * self.quantile:g} of Poisson({self.in_repair:.3g}) + {self.rack} = {self.most_in_repair} + "
                f"{self.rack}",
                f"{self.nodes}",
            )
        ]


def spares_for(
    failures: Failures,
    gpus: float,
    repair_s: float = REPAIR,
    *,
    rack_nodes: int = 4,
    swapped: float = 1.0,
    quantile: float = SPARES_QUANTILE,
) -> Spares:
    """The spares of a job: P99 of the nodes in repair at once, which are Poisson(rate x nodes x repair time), + a rack.

    `swapped` is the share of failures after which the node is replaced; about a quarter, if the others are cured by a
    restart on the same host. Raises UserError for what cannot be.
    """
    not_negative("the repair time", repair_s, "seconds")
    fraction("the share of failures after which a node is replaced", swapped)
    if rack_nodes != int(rack_nodes) or rack_nodes < 0:
        raise UserError(f"a rack of {rack_nodes:g} nodes; give a whole number, or 0 for no rack")
    mean = failures.a_day(gpus) * swapped * repair_s / DAY
    return Spares(mean, quantile, poisson_quantile(mean, quantile), int(rack_nodes))


def poisson_quantile(mean: float, quantile: float) -> int:
    """The least number that a Poisson variable of this mean exceeds with a probability of at most 1 - quantile."""
    not_negative("the mean of a Poisson variable", mean, "events")
    if not 0 < quantile < 1:
        raise UserError(f"a quantile of {quantile:g}; give a fraction between 0 and 1, such as 0.99")
    if mean == 0:
        return 0
    # Far below the mean the probabilities are nothing, and of a great mean there are too many of them to add.
    number = max(0, int(mean - 12 * sqrt(mean)))
    below = exp(number * log(mean) - mean - lgamma(number + 1))
    while below < quantile:
        number += 1
        below += exp(number * log(mean) - mean - lgamma(number + 1))
    return number
