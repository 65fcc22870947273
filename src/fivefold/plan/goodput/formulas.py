"""Goodput: the share of calendar time in which a job gets on, in formulas, from how often it fails and how it saves.

ETTR (effective training time ratio) is useful time / calendar time. Failures are taken as exponential, and one does not
strike while the job restarts from another; what the formulas cannot know (lemon nodes, racks, spares that run out) is
simulated in `events.py`, which agrees with them where both apply. Times are in seconds. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import expm1, inf, isinf, sqrt
from typing import Any

from fivefold.errors import UserError
from fivefold.plan.goodput.failures import Failures
from fivefold.plan.quantities import count, formula, not_negative, percent, plain, positive, time


def young_interval(stall: float, mttf: float) -> float:
    """Useful seconds between checkpoints, to first order: sqrt(2 C M) (Young 1974)."""
    _check(stall, mttf)
    return sqrt(2 * stall * mttf)


def daly_interval(stall: float, mttf: float) -> float:
    """As `young_interval` to a higher order (Daly 2006): sqrt(2CM)(1 + sqrt(C/2M)/3 + C/18M) - C; M if C >= 2M."""
    _check(stall, mttf)
    if stall >= 2 * mttf:
        return mttf
    ratio = stall / (2 * mttf)
    return sqrt(2 * stall * mttf) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall


def best_interval(stall: float, mttf: float) -> float:
    """The useful seconds between checkpoints with the greatest `ettr`, whatever the restart takes.

    They solve 1 - T/M = exp(-(T + C)/M), where the derivative of `ettr` is 0; found by bisection.
    """
    _check(stall, mttf)
    if isinf(mttf) or stall == 0:
        return inf if isinf(mttf) else 0.0
    low, high = 0.0, mttf
    while high - low > 1e-12 * mttf:
        middle = (low + high) / 2
        if -expm1(-(middle + stall) / mttf) > middle / mttf:
            low = middle
        else:
            high = middle
    return low


def ettr(interval: float, stall: float, restart: float, mttf: float) -> float:
    """The exact ETTR with one kind of checkpoint: T / ((M + R)(exp((T + C)/M) - 1)).

    A stall of C follows each T of useful time, and a failure costs what was done since the last whole checkpoint, and
    R to detect, restart and load. Raises UserError for times that cannot be.
    """
    _check(stall, mttf)
    not_negative("the restart time", restart, "seconds")
    positive("the interval between checkpoints", interval, "seconds")
    if isinf(mttf):
        return interval / (interval + stall)
    cycle = (interval + stall) / mttf
    return 0.0 if cycle > 700 else interval / ((mttf + restart) * expm1(cycle))


def first_order_ettr(interval: float, stall: float, restart: float, mttf: float) -> float:
    """`ettr` to first order in T/M, C/T and R/M: 1 - C/T - (T/2 + R)/M, and not below 0."""
    _check(stall, mttf)
    positive("the interval between checkpoints", interval, "seconds")
    return max(0.0, 1 - stall / interval - (interval / 2 + restart) / mttf)


@dataclass(frozen=True)
class Tier:
    """One kind of checkpoint, and which failures it serves."""

    name: str
    interval: float
    """Useful seconds between two."""
    stall: float
    """Seconds that training waits for one."""
    load: float
    """Seconds to load one after a failure."""
    share: float
    """Of the failures, those whose fastest surviving tier it is."""
    survives_rack: bool = True
    """Whether it outlives the loss of a rack; a copy in the memory of a peer does if the peer is in another rack."""


THREE_TIERS = (
    Tier("memory", 300.0, 0.5, 20.0, 0.75),
    Tier("ssd", 1800.0, 2.0, 90.0, 0.225, survives_rack=False),
    Tier("remote", 10800.0, 5.0, 600.0, 0.025),
)
"""Memory of a peer every 5 min, the node's SSD every 30, remote storage every 3 h. About three quarters of all failures
are cured by a restart on the same host, where memory serves; that nine tenths of the others find SSDs is assumed."""
DETECT = 120.0
"""Seconds to detect a failure and to restart, before anything is loaded."""


def check_tiers(tiers: Sequence[Tier], detect: float) -> None:
    """Raise UserError unless the tiers go from the fastest to the surest and their shares are those of all failures."""
    if not tiers:
        raise UserError("no checkpoint tier is given; a job without checkpoints starts again at each failure")
    not_negative("the time to detect and restart", detect, "seconds")
    for tier in tiers:
        positive(f"the interval of tier {tier.name}", tier.interval, "seconds")
        not_negative(f"the stall of tier {tier.name}", tier.stall, "seconds")
        not_negative(f"the load time of tier {tier.name}", tier.load, "seconds")
        not_negative(f"the share of tier {tier.name}", tier.share, "failures as a fraction of all")
        if tier.stall > tier.interval:
            raise UserError(
                f"tier {tier.name} stalls training for {time(tier.stall)} every {time(tier.interval)}; the stall "
                "cannot be the longer one (both are in seconds)"
            )
    for faster, slower in pairwise(tiers):
        if faster.interval >= slower.interval:
            raise UserError(
                f"tier {faster.name} is saved every {time(faster.interval)} and tier {slower.name}, behind it, every "
                f"{time(slower.interval)}; order the tiers by their intervals, the most frequent first"
            )
    total = sum(tier.share for tier in tiers)
    if abs(total - 1) > 1e-6:
        shares = " + ".join(f"{tier.share:g}" for tier in tiers)
        raise UserError(
            f"the tiers' shares of the failures are {shares} = {total:g}, and must be 1 together: each failure is "
            "served by one tier"
        )


def tiers_first_order(tiers: Sequence[Tier], detect: float, mttf: float) -> float:
    """ETTR with several tiers to first order, not below 0: 1 - sum C_i/T_i - (1/M) sum p_i (D + L_i + T_i/2)."""
    check_tiers(tiers, detect)
    stalls = sum(tier.stall / tier.interval for tier in tiers)
    lost = sum(tier.share * (detect + tier.load + tier.interval / 2) for tier in tiers)
    return max(0.0, 1 - stalls - lost / mttf)


def tiers_ettr(tiers: Sequence[Tier], detect: float, mttf: float) -> float:
    """ETTR with several tiers that also holds where failures are frequent; with one tier it is `ettr`.

    Between two failures the job runs M and gets on by M f, f = 1 / (1 + sum C_i/T_i). A failure that tier i serves
    costs what was done since its last checkpoint. That age grows until the next checkpoint, after T_i/f, or until a
    failure that this or a surer tier serves, at a rate q_i/M, q_i = sum of p_j for j >= i. So in the mean it is
    A_i = M/q_i - (T_i/f) / (exp(q_i T_i / (f M)) - 1), and ETTR = f (M - sum p_i A_i) / (M + sum p_i (D + L_i)).
    What failures of faster tiers set back in between is left out.
    """
    check_tiers(tiers, detect)
    _check(0.0, mttf)
    running = 1 / (1 + sum(tier.stall / tier.interval for tier in tiers))
    if isinf(mttf):
        return running
    lost = sum(tier.share * age for tier, age in zip(tiers, _ages(tiers, running, mttf), strict=True))
    return running * (mttf - lost) / (mttf + _restart(tiers, detect))


def _ages(tiers: Sequence[Tier], running: float, mttf: float) -> list[float]:
    """Seconds since the last checkpoint of each tier when a failure strikes that needs it, in the mean."""
    ages = []
    for number, tier in enumerate(tiers):
        resets = sum(other.share for other in tiers[number:]) / mttf
        period = tier.interval / running
        # Where next to nothing resets the age it is uniform; the difference of two large numbers would be noise.
        if resets * period < 1e-6:
            ages.append(period / 2)
        elif resets * period > 700:
            ages.append(1 / resets)
        else:
            ages.append(1 / resets - period / expm1(resets * period))
    return ages


def _restart(tiers: Sequence[Tier], detect: float) -> float:
    """Seconds from a failure until training goes on, in the mean."""
    return sum(tier.share * (detect + tier.load) for tier in tiers)


LEAST = 0.01
"""ETTR below which a job is said not to end: its days are then those of luck, and no figure to plan with."""


@dataclass(frozen=True)
class Goodput:
    """What failures leave of a job's time."""

    gpus: int
    failures: Failures
    tiers: tuple[Tier, ...]
    detect: float
    ettr: float
    first_order: float
    """The same by the first-order formula, which is too low where failures are frequent."""

    @property
    def mttf(self) -> float:
        """Seconds between failures."""
        return self.failures.mttf(self.gpus)

    @property
    def ends(self) -> bool:
        """Whether the job gets on enough to say when it ends."""
        return self.ettr >= LEAST

    def calendar_days(self, busy_days: float) -> float:
        """Days that so many days of undisturbed training take. Raises UserError if the job does not end."""
        not_negative("the days of training", busy_days, "days")
        if not self.ends:
            raise UserError(
                f"the job never gets on: it fails every {time(self.mttf)}, and the tier {self.tiers[0].name} is saved "
                f"every {time(self.tiers[0].interval)}; save more often"
            )
        return busy_days / self.ettr

    def json(self) -> dict[str, Any]:
        """All of it as plain values; times in seconds."""
        return {
            "gpus": self.gpus,
            "failures": self.failures.json(),
            "failures_a_day": self.failures.a_day(self.gpus),
            "tiers": [asdict(tier) for tier in self.tiers],
            "detect": self.detect,
            **plain({"mttf": self.mttf, "ettr": self.ettr, "first_order": self.first_order}),
            "basis": {"failures": self.failures.basis, "tiers": "assumed"},
        }

    def explain(self) -> list[str]:
        """Each figure's formula with its numbers."""
        running = 1 / (1 + sum(tier.stall / tier.interval for tier in self.tiers))
        stalls = " + ".join(f"{tier.stall:g}/{tier.interval:g}" for tier in self.tiers)
        lines = [*self.failures.explain(self.gpus)]
        lines.append(formula("running f", "1 / (1 + sum C/T)", f"1 / (1 + {stalls})", f"{running:.4f}"))
        if isinf(self.mttf):
            return [*lines, f"ETTR = f = {self.ettr:.4f}: nothing fails"]
        ages = _ages(self.tiers, running, self.mttf)
        lost = sum(tier.share * age for tier, age in zip(self.tiers, ages, strict=True))
        for tier, age in zip(self.tiers, ages, strict=True):
            lines.append(
                f"tier {tier.name}: serves {percent(tier.share)} of the failures, costs {time(age)} of work and "
                f"{time(self.detect)} + {time(tier.load)} to detect, restart and load"
            )
        numbers = (
            f"{running:.4f} ({count(self.mttf)} - {count(lost)}) / ({count(self.mttf)} + "
            f"{count(_restart(self.tiers, self.detect))})"
        )
        lines.append(formula("ETTR", "f (M - lost work) / (M + restart)", numbers, f"{self.ettr:.4f}"))
        lines.append(f"first order: 1 - sum C/T - (1/M) sum p (D + L + T/2) = {self.first_order:.4f}")
        return lines


def goodput(failures: Failures, gpus: int, tiers: Sequence[Tier] = THREE_TIERS, detect: float = DETECT) -> Goodput:
    """The goodput of a job on so many GPUs. Raises UserError for tiers or times that cannot be."""
    mttf = failures.mttf(gpus)
    return Goodput(
        gpus, failures, tuple(tiers), detect, tiers_ettr(tiers, detect, mttf), tiers_first_order(tiers, detect, mttf)
    )


def one_tier(stall: float, load: float, mttf: float, interval: float | None = None) -> Tier:
    """A single kind of checkpoint that serves all failures, at its best interval unless one is given."""
    chosen = best_interval(stall, mttf) if interval is None else interval
    if chosen == 0 or isinf(chosen):
        raise UserError(
            f"with a stall of {stall:g} s and a failure every {time(mttf)} there is no best interval; give one"
        )
    return Tier("checkpoint", chosen, stall, load, 1.0)


def _check(stall: float, mttf: float) -> None:
    not_negative("the stall of a checkpoint", stall, "seconds")
    if not isinf(mttf):
        positive("the time between failures", mttf, "seconds")
