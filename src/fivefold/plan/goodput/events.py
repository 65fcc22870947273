"""Goodput simulated failure by failure: what formulas leave out are lemon nodes, racks, and spares that run out.

A job runs on its nodes until one of them fails, goes back to the last checkpoint of the tier that serves the failure,
waits for a spare if the node is replaced and none is there, restarts, and runs on. The same seed gives the same
failures. Times are in seconds, nodes have 8 GPUs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from heapq import heappop, heappush
from math import ceil, floor, inf, isinf, sqrt
from typing import Any

import numpy as np

from fivefold.errors import UserError
from fivefold.plan.goodput.failures import NODE_GPUS, REPAIR, Failures
from fivefold.plan.goodput.formulas import DETECT, THREE_TIERS, Tier, check_tiers
from fivefold.plan.quantities import DAY, count, fraction, not_negative, percent, positive, time, whole

LEMON_SHAPE = 0.12
"""Shape of the Gamma distribution of the nodes' rates with which the worst 3 of 63 nodes cause half of all failures, as
one cluster saw of its exclusions."""
BATCHES = 20
"""Parts of a simulation whose spread gives its error."""
ROUNDING = 1e-5
"""Seconds that a point in the work may be off, by the rounding of numbers as large as years."""


@dataclass(frozen=True)
class Fleet:
    """The machines of a job and how they fail."""

    gpus: int
    failures: Failures
    lemon_shape: float | None = None
    """Gamma shape of the nodes' rates, whose mean is that of `failures`: the smaller, the more the worst nodes cause;
    `LEMON_SHAPE` is what was seen. None for nodes that are all alike."""
    rack_nodes: int = 4
    """Nodes of a rack."""
    rack_losses_per_1000_rack_days: float = 0.0
    """How often a whole rack fails, beside the failures of its nodes."""
    swapped: float = 0.25
    """Share of the nodes' failures after which the node is replaced; a restart on the same host cures the others."""
    excluded_after: int | None = None
    """Failures after which a node is taken for a lemon: it is replaced, and a new one is bought for it. None for never.
    """
    spares: int | None = None
    """Nodes that stand ready; None for as many as are needed."""
    repair: float = REPAIR
    """Seconds that a replaced node is away, in the mean; exponential. It comes back as a spare, no better than it
    was."""
    fails_in_restarts: bool = False
    """Whether failures also strike while the job restarts, which then begins again; the formulas leave them out."""

    @property
    def nodes(self) -> int:
        """Nodes that the job needs."""
        return self.gpus // NODE_GPUS

    @property
    def racks(self) -> int:
        """Racks that they fill."""
        return -(-self.nodes // self.rack_nodes)

    @property
    def mttf(self) -> float:
        """Seconds between failures in the mean, those of racks included."""
        daily = self.failures.a_day(self.gpus) + self.racks * self.rack_losses_per_1000_rack_days / 1000
        return DAY / daily if daily else inf


@dataclass(frozen=True)
class Times:
    """Where the time of a job went, in seconds."""

    useful: float = 0.0
    stalls: float = 0.0
    """Of checkpoints."""
    lost: float = 0.0
    """Work that was done again."""
    restarts: float = 0.0
    """Detecting, restarting, loading."""
    waited: float = 0.0
    """For spares."""

    @property
    def total(self) -> float:
        """All of it: calendar time."""
        return self.useful + self.stalls + self.lost + self.restarts + self.waited

    def __add__(self, other: Times) -> Times:
        return Times(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


@dataclass(frozen=True)
class Simulated:
    """What came of a simulated job."""

    ettr: float
    error: float
    """One standard error of `ettr`, from the spread of parts of the simulation."""
    seed: int
    failures: int
    rack_losses: int
    swaps: int
    """Nodes replaced."""
    waits: int
    """Failures after which no spare was ready."""
    times: Times

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self) | {"total": self.times.total, "basis": "simulated"}

    def explain(self) -> list[str]:
        """Where the time went."""
        times = self.times
        parts = {
            "useful": times.useful,
            "stalls of checkpoints": times.stalls,
            "work done again": times.lost,
            "detecting, restarting, loading": times.restarts,
            "waiting for spares": times.waited,
        }
        return [
            f"simulated {time(times.total)}, seed {self.seed}: {self.failures:,} failures, {self.rack_losses:,} of "
            f"them racks, {self.swaps:,} nodes replaced, {self.waits:,} waits for a spare",
            *(f"{name}: {percent(seconds / times.total)} of the time" for name, seconds in parts.items()),
            f"ETTR = useful / all = {count(times.useful)} / {count(times.total)} = {self.ettr:.4f} +- {self.error:.4f}",
        ]


def simulate_goodput(
    fleet: Fleet,
    tiers: Sequence[Tier] = THREE_TIERS,
    detect: float = DETECT,
    *,
    failures: int = 2000,
    seed: int = 0,
) -> Simulated:
    """Simulate a job until it has been stopped by so many failures.

    Raises UserError for a fleet, tiers or times that cannot be, and where nothing fails.
    """
    check_tiers(tiers, detect)
    _check(fleet, tiers, failures)
    machines, progress = _Machines(fleet, np.random.default_rng(seed)), Progress(tiers)
    batches = [Times()] * BATCHES
    position = 0.0
    for number in range(failures):
        up = machines.run()
        reached, saved = progress.run(position, up)
        tier, restarts, waited = _recover(machines, tiers, detect)
        # What survives besides the tier that serves are the surer ones; the newest of them is loaded.
        back = max(saved[tier:])
        spent = Times(back - position, up - (reached - position), reached - back, restarts, waited)
        batches[number * BATCHES // failures] += spent
        position = back
    times = sum(batches, Times())
    ratio = times.useful / times.total
    squares = sum((batch.useful - ratio * batch.total) ** 2 for batch in batches)
    error = sqrt(squares * BATCHES / (BATCHES - 1)) / times.total
    return Simulated(ratio, error, seed, machines.failures, machines.rack_losses, machines.swaps, machines.waits, times)


def _recover(machines: _Machines, tiers: Sequence[Tier], detect: float) -> tuple[int, float, float]:
    """The tier that is loaded after a failure, the seconds of restarting, and those of waiting for spares."""
    tier, restarts, waited = 0, 0.0, 0.0
    while True:
        tier = max(tier, machines.serving(tiers))
        waited += machines.replace()
        needed = detect + tiers[tier].load
        undisturbed = machines.restart(needed)
        restarts += undisturbed
        if undisturbed == needed:
            return tier, restarts, waited


class _Machines:
    """The nodes of the job, those in repair and those that stand ready, through time."""

    def __init__(self, fleet: Fleet, draw: np.random.Generator) -> None:
        self._fleet, self._draw = fleet, draw
        nodes = fleet.nodes + (fleet.spares or 0)
        rates = self._relative_rates(nodes)
        # The published rate is that of a fleet as it is, so its nodes have it in the mean, however few they are.
        self._rates = list(rates / rates.mean() * self._mean_rate)
        self._counts = [0] * nodes
        self._job = np.arange(fleet.nodes)
        self._ready = list(range(fleet.nodes, nodes))
        self._repairs: list[tuple[float, int]] = []  # (when a node is back, its number)
        self._rack_rate = fleet.racks * fleet.rack_losses_per_1000_rack_days / 1000 / DAY
        self._now = 0.0
        self._failed = np.arange(0)
        self._rack = False
        self.failures = self.rack_losses = self.swaps = self.waits = 0
        self._add_up()

    def run(self) -> float:
        """Run until something fails: the seconds that takes."""
        up = self._next()
        self._now += up
        self._fail()
        return up

    def serving(self, tiers: Sequence[Tier]) -> int:
        """The number of the fastest tier that outlived the failure."""
        if self._rack:
            return next(number for number, tier in enumerate(tiers) if tier.survives_rack)
        chosen = np.searchsorted(np.cumsum([tier.share for tier in tiers]), self._draw.random(), side="right")
        return min(int(chosen), len(tiers) - 1)

    def replace(self) -> float:
        """Put spares in the place of what has to be replaced: the seconds that the job waits for them."""
        failed = [int(node) for node in self._job[self._failed]]
        if not self._rack and self._draw.random() >= self._fleet.swapped and not self._is_lemon(failed[0]):
            return 0.0
        for node in failed:
            back = self._new_node() if self._is_lemon(node) else node
            heappush(self._repairs, (self._now + self._draw.exponential(self._fleet.repair), back))
        before = self._now
        self._job[self._failed] = [self._spare() for _ in failed]
        self.swaps += len(failed)
        self.waits += self._now > before
        self._add_up()
        return self._now - before

    def restart(self, needed: float) -> float:
        """Seconds of a restart: `needed`, or fewer if a failure strikes and it has to begin again."""
        until = self._next() if self._fleet.fails_in_restarts else inf
        self._now += min(needed, until)
        if until < needed:
            self._fail()
        return min(needed, until)

    def _spare(self) -> int:
        """A node that is ready, once one is."""
        while self._repairs and self._repairs[0][0] <= self._now:
            self._ready.append(heappop(self._repairs)[1])
        if self._ready:
            return self._ready.pop(0)
        if self._fleet.spares is None:
            return self._new_node()
        self._now, node = heappop(self._repairs)
        return node

    def _new_node(self) -> int:
        """A node that was not there before."""
        self._rates.append(float(self._relative_rates(1)[0]) * self._mean_rate)
        self._counts.append(0)
        return len(self._rates) - 1

    def _is_lemon(self, node: int) -> bool:
        limit = self._fleet.excluded_after
        return limit is not None and self._counts[node] >= limit

    @property
    def _mean_rate(self) -> float:
        """Failures of a node in a second."""
        return self._fleet.failures.per_1000_node_days / 1000 / DAY

    def _relative_rates(self, nodes: int) -> np.ndarray:
        """(nodes,) rates relative to the mean."""
        shape = self._fleet.lemon_shape
        return np.ones(nodes) if shape is None else self._draw.gamma(shape, 1 / shape, nodes)

    def _add_up(self) -> None:
        """The rates of the job's nodes one after the other, among which `_fail` chooses."""
        self._edges = np.cumsum([self._rates[node] for node in self._job])

    def _next(self) -> float:
        """Seconds until the next failure."""
        return float(self._draw.exponential(1 / (self._edges[-1] + self._rack_rate)))

    def _fail(self) -> None:
        """Choose what fails."""
        self.failures += 1
        where = self._draw.random() * (self._edges[-1] + self._rack_rate)
        self._rack = where >= self._edges[-1]
        if self._rack:
            self.rack_losses += 1
            first = int(self._draw.integers(self._fleet.racks)) * self._fleet.rack_nodes
            self._failed = np.arange(first, min(first + self._fleet.rack_nodes, self._fleet.nodes))
        else:
            self._failed = np.searchsorted(self._edges, [where], side="right")
            self._counts[self._job[self._failed[0]]] += 1


class Progress:
    """How far a job gets, in useful seconds since its beginning, of which every T has a checkpoint of a tier."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._grid = [(tier.interval, tier.stall) for tier in tiers]

    def run(self, start: float, up: float) -> tuple[float, list[float]]:
        """What `up` seconds reach from `start`, where a checkpoint has just been loaded; and each tier's last one.

        A checkpoint is whole when its stall is over, and so are those of other tiers at the same point.
        """
        high = start + up
        low = high - self._stalls(start, high, ceil)
        while high - low > ROUNDING / 10:
            before = self._stalls(start, low, floor)
            if before == self._stalls(start, high, ceil):  # no checkpoint lies in between; one may at `low`
                low = max(low, start + up - before)
                break
            middle = (low + high) / 2
            if middle - start + self._stalls(start, middle, ceil) <= up:
                low = middle
            else:
                high = middle
        stalled_until = low - start + self._stalls(start, low + ROUNDING, floor)
        return low, [self._last(low, interval, whole=stalled_until <= up) for interval, _ in self._grid]

    def _stalls(self, start: float, end: float, rounded: Callable[[float], int]) -> float:
        """Seconds of all stalls after `start` and before `end`; rounded with `floor` those at `end` too."""
        excluded = 1 if rounded is ceil else 0
        return sum(
            stall * max(0, rounded(end / interval) - excluded - floor((start + ROUNDING) / interval))
            for interval, stall in self._grid
        )

    def _last(self, reached: float, interval: float, whole: bool) -> float:
        """Where the last whole checkpoint of a tier is."""
        number = floor((reached + ROUNDING) / interval)
        here = abs(number * interval - reached) <= ROUNDING
        return (number - (here and not whole)) * interval


def _check(fleet: Fleet, tiers: Sequence[Tier], failures: int) -> None:
    whole("the number of GPUs", fleet.gpus)
    if fleet.gpus % NODE_GPUS:
        more = -(-fleet.gpus // NODE_GPUS) * NODE_GPUS
        raise UserError(f"{fleet.gpus:,} GPUs are no whole number of nodes of {NODE_GPUS}; simulate {more:,}")
    whole("the number of nodes of a rack", fleet.rack_nodes)
    if fleet.lemon_shape is not None:
        positive("the shape of the nodes' rates", fleet.lemon_shape, f"no unit, such as {LEMON_SHAPE:g}")
    not_negative("the rate of rack losses", fleet.rack_losses_per_1000_rack_days, "losses in 1,000 rack-days")
    not_negative("the share of failures after which a node is replaced", fleet.swapped, "failures as a fraction of all")
    if fleet.swapped:
        fraction("the share of failures after which a node is replaced", fleet.swapped)
    if fleet.excluded_after is not None:
        whole("the number of failures after which a node is a lemon", fleet.excluded_after)
    not_negative("the number of spares", fleet.spares or 0, "nodes")
    not_negative("the repair time", fleet.repair, "seconds")
    if failures < BATCHES or failures != int(failures):
        raise UserError(f"a simulation of {failures:g} failures; give a whole number of at least {BATCHES}")
    if isinf(fleet.mttf):
        raise UserError("nothing fails at a rate of 0, so there is nothing to simulate; the formulas have the stalls")
    if fleet.rack_losses_per_1000_rack_days and not any(tier.survives_rack for tier in tiers):
        raise UserError(
            f"racks are lost, and no tier survives that: {', '.join(tier.name for tier in tiers)}; add remote storage, "
            "or a copy in another rack"
        )
