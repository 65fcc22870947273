"""Each figure of a forecast as a formula with its numbers, and the constants that stand in them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

from fivefold.config.run import Run
from fivefold.model.reach import goes_by_node, ranks_reached, tokens_arriving
from fivefold.plan.cluster import Cluster
from fivefold.plan.constants import constants
from fivefold.plan.figures import Figure
from fivefold.plan.forecast import Forecast
from fivefold.plan.forecast_table import PARTS, error_line, headline, model_line
from fivefold.plan.memory.peak import GIB, RankMemory
from fivefold.plan.quantities import formula, rate, time
from fivefold.plan.software import Software
from fivefold.plan.time.formats import product_format
from fivefold.plan.time.rates import Rates
from fivefold.plan.time.work import Sizes


def explanation(found: Forecast) -> list[str]:
    """All of it, under headings."""
    sections = {
        "figures": [_with_basis(figure) for figure in found.figures],
        "time of a step, on the busiest pipeline rank": _time(found),
        "rates": rate_lines(found),
        "memory, on the fullest pipeline rank": found.memory.explanation(),
        "memory by pipeline rank": [_rank(rank) for rank in found.memory.ranks],
        "budget without any layout": found.budget.explain(),
        "cost": found.cost.explain(),
        "storage": found.storage.explain(),
        "assumptions": found.assumptions(),
        "error": [error_line(found)],
    }
    if found.execution.residual is not None:
        sections["calibration"] = found.execution.residual.lines()
    lines = [f"run {found.run.name} on {headline(found)}", model_line(found)]
    for title, section in sections.items():
        lines += ["", title, *(f"  {line}" for line in section)]
    return [*lines, "", found.short_verdict()]


class Reckoned(Protocol):
    """What is reckoned with rates: a training run, or a forward pass."""

    @property
    def run(self) -> Run:
        """Its accelerator is known."""

    @property
    def cluster(self) -> Cluster:
        """Its machines."""

    @property
    def software(self) -> Software:
        """What it is executed by."""


def _with_basis(figure: Figure) -> str:
    error = f", {figure.error_text}" if figure.error_text else ""
    return f"{figure.formula}  [{figure.basis}{error}]"


def _time(found: Forecast) -> list[str]:
    """The parts, the stages, and how they add up."""
    step, microbatches = found.step, found.microbatches
    once = {"bubble", "reduction", "optimizer"}
    lines = []
    for name, meaning in PARTS.items():
        seconds = step.parts.get(name, 0.0)
        if not seconds:
            continue
        how = "" if name in once else f" = {microbatches:,} microbatches x {time(seconds / microbatches)}"
        lines.append(f"{name}{how} = {time(seconds)}: {meaning}")
        if name == "ep":
            lines.append(_exchange(found))
    for first, last, (forward, input, weight) in _alike(step.stages):
        which = f"stage {first}" if first == last else f"each of stages {first} to {last}"
        lines.append(
            f"{which}, a microbatch: forward {time(forward)}, gradient of the input {time(input)}, of the weights "
            f"{time(weight)}"
        )
    if len(step.stages) > 1:
        lines.append(f"a transfer between stages = {time(step.hop)}")
    terms = " + ".join(f"{seconds:.4g}" for seconds in step.parts.values())
    return [*lines, formula("time of a step", "sum of the parts", terms, time(step.seconds))]


def _exchange(found: Forecast) -> str:
    """What travels between experts in one layer and direction."""
    run, moe, near = found.run, found.run.model.moe, found.cluster.nearby
    assert moe is not None, "only experts have an exchange"
    ep, hot, once = run.parallel.ep, found.software.hot_experts, found.software.ep_once
    sizes = Sizes.of(run, found.software)
    tokens, row = sizes.tokens / run.parallel.tp, run.model.hidden * sizes.width
    rows = tokens_arriving(moe, ep, hot) if once == "rank" else moe.top_k * hot
    how = {"choice": "one for each choice", "node": "one for each choice", "rank": "one for each rank of its experts"}
    said = (
        f"ep, a layer and direction: {tokens:,.0f} tokens of a rank x {rows:.2f} rows ({how[once]}) x {row:,} bytes = "
        f"{tokens * rows * row / 1e6:,.1f} MB to and from {ep:,} ranks, this one among them"
    )
    by_node = (once == "node" and ep > near) or (once == "rank" and goes_by_node(moe, ep, near))
    if not by_node:
        return said
    return f"{said}; the network carries one for each node of its experts, {ranks_reached(moe, ep / near):.2f} of them"


def _alike(stages: Sequence[tuple[float, float, float]]) -> Iterator[tuple[int, int, tuple[float, float, float]]]:
    """The first and the last of each stretch of stages that take the same, and what they take."""
    first = 0
    for seconds, stretch in groupby(stages):
        count = len(list(stretch))
        yield first, first + count - 1, seconds
        first += count


def rate_lines(found: Reckoned) -> list[str]:
    """What an operation is reckoned with."""
    accelerator, cluster, run = found.cluster.accelerator, found.cluster, found.run
    rates = Rates(run, accelerator, found.software, constants())
    family, generation = rates.family, rates.generation
    format = product_format(run)
    attention = generation.attention_of(accelerator.family)
    return [
        f"peak of {accelerator.name} in {format} = {accelerator.peak_of(format):.4g} FLOP/s "
        f"({_sure(found, 'peak_tflops')})",
        formula("a large product", "peak x share", f"peak x {family.matmul:.3f}", f"at most {family.matmul:.1%} of it"),
        "a product (m, n, k) takes the longer of 2 m n k / (rate x share of the tiles and waves that is used x k / "
        f"(k + {family.depth:.0f})) and its bytes / bandwidth, + {generation.launch * 1e6:.1f} us",
        f"attention's own products reach {attention:.3f} of the peak, causal, the masked half not counted",
        formula(
            "bandwidth of the memory",
            "datasheet x share",
            f"{rate(accelerator.bandwidth)} x {family.bandwidth:.3f}",
            f"{rate(rates.bandwidth)} ({_sure(found, 'bandwidth_tb_s')})",
        ),
        f"pointwise operations move {generation.pointwise:.2f} x what the simplest kernels would",
        f"links: {rate(cluster.link)} a GPU and direction x {family.link:.3f}, over {cluster.domain} GPUs "
        f"({_sure(found, 'link_gb_s')})",
        f"network: {rate(cluster.nic)} a GPU and direction x {family.nic:.3f} ({_sure(found, 'nic_gbit_s')})",
        f"of communication beside computation {generation.overlap:.0%} of the shorter one is hidden",
    ]


def _sure(found: Reckoned, key: str) -> str:
    """How sure the catalogue is of a number."""
    if key == "nic_gbit_s" and found.run.cluster.nic_gbit_s != "auto":
        return "given"
    confidence = found.cluster.accelerator.confidence
    stands_for = "matmul_tflops" if key == "peak_tflops" else key  # the best rate is the peak where none is known
    return confidence.get(key) or confidence.get(stands_for, "not stated")


def _rank(rank: RankMemory) -> str:
    """A pipeline rank's sum."""
    terms = " + ".join(f"{name.replace('_', ' ')} {value / GIB:.2f}" for name, value in rank.parts.items() if value)
    return f"pipeline rank {rank.pp} = {terms} = {rank.allocated / GIB:.2f} GiB ({rank.moment})"
