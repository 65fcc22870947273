"""What a run costs: days, GPU-hours, money and energy, from the time of a step and what failures leave of the time.

Undisturbed training is `busy`; with what failures take it is `calendar`, and that is what is paid for, spares included.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.plan.cluster import Cluster
from fivefold.plan.goodput.formulas import LEAST, Goodput
from fivefold.plan.quantities import DAY, HOUR, count, formula, not_negative, percent, positive, time, whole

PUE = 1.2
"""Power usage effectiveness, what a data centre draws for each watt of its computers: an assumption, give your own.
BLOOM's had 1.2 (Luccioni et al. 2022)."""


@dataclass(frozen=True)
class Cost:
    """Time, money and energy of a run."""

    tokens: float
    steps: int
    step_seconds: float
    gpus: int
    spare_gpus: int = 0
    """That stand ready and are paid for too."""
    ettr: float = 1.0
    """Useful time / calendar time; 1 if failures are left out. Below `LEAST` the run does not end, and what follows
    from its end is None."""
    price: float | None = None
    """Money for a GPU and hour; None leaves money out."""
    watts: float | None = None
    """Of a GPU; None leaves energy out."""
    pue: float = PUE
    goodput: Goodput | None = None
    """Where `ettr` comes from."""

    @property
    def busy_days(self) -> float:
        """Days of undisturbed training."""
        return self.steps * self.step_seconds / DAY

    @property
    def busy_gpu_hours(self) -> float:
        """GPU-hours of undisturbed training, which is what is mostly published."""
        return self.steps * self.step_seconds / HOUR * self.gpus

    @property
    def calendar_days(self) -> float | None:
        """Days from the first step to the last."""
        return self.busy_days / self.ettr if self.ettr >= LEAST else None

    @property
    def paid_gpu_hours(self) -> float | None:
        """GPU-hours of all that time, spares included."""
        days = self.calendar_days
        return None if days is None else days * DAY / HOUR * (self.gpus + self.spare_gpus)

    @property
    def money(self) -> float | None:
        """Of the paid GPU-hours, in the price's currency."""
        hours = self.paid_gpu_hours
        return None if self.price is None or hours is None else hours * self.price

    @property
    def busy_money(self) -> float | None:
        """Of the GPU-hours of undisturbed training alone."""
        return None if self.price is None else self.busy_gpu_hours * self.price

    @property
    def energy_kwh(self) -> float | None:
        """Kilowatt-hours that the data centre draws, if each paid GPU draws its watts all the time."""
        hours = self.paid_gpu_hours
        return None if self.watts is None or hours is None else hours * self.watts / 1000 * self.pue

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        names = ("busy_days", "busy_gpu_hours", "calendar_days", "paid_gpu_hours", "money", "busy_money", "energy_kwh")
        fields = {name: value for name, value in asdict(self).items() if name != "goodput"}
        return fields | {
            **{name: getattr(self, name) for name in names},
            "goodput": None if self.goodput is None else self.goodput.json(),
            "basis": {
                "ettr": "none: failures are left out" if self.goodput is None else "assumed",
                "price": "given",
                "watts": "catalogued",
                "pue": "assumed",
            },
        }

    def explain(self) -> list[str]:
        """Each figure's formula with its numbers."""
        return [
            formula(
                "busy time",
                "steps x time of a step",
                f"{self.steps:,} x {time(self.step_seconds)}",
                f"{self.busy_days:.4g} days",
            ),
            formula(
                "busy GPU-hours",
                "busy time x GPUs",
                f"{self.busy_days:.4g} x 24 x {self.gpus:,}",
                count(self.busy_gpu_hours),
            ),
            *([] if self.goodput is None else self.goodput.explain()),
            *self._explain_the_end(),
        ]

    def _explain_the_end(self) -> list[str]:
        """What follows from how long the run takes, if it ends."""
        days, hours = self.calendar_days, self.paid_gpu_hours
        if days is None or hours is None:
            return [f"calendar time: with an ETTR below {percent(LEAST)} the run would not end"]
        every = f"{self.gpus:,}" + (f" + {self.spare_gpus:,}" if self.spare_gpus else "")
        lines = [
            formula("calendar time", "busy time / ETTR", f"{self.busy_days:.4g} / {self.ettr:.4f}", f"{days:.4g} days"),
            formula("paid GPU-hours", "calendar time x (GPUs + spares)", f"{days:.4g} x 24 x ({every})", count(hours)),
        ]
        if self.money is not None:
            numbers = f"{count(hours)} x {self.price:g}"
            lines.append(formula("money", "paid GPU-hours x price", numbers, f"{self.money:,.0f}"))
        if self.energy_kwh is not None:
            numbers = f"{count(hours)} x {self.watts:g} W x {self.pue:g}"
            value = f"{count(self.energy_kwh / 1000)} MWh"
            lines.append(formula("energy", "paid GPU-hours x watts of a GPU x PUE", numbers, value))
        return lines


def cost(
    tokens: float,
    tokens_a_step: float,
    step_seconds: float,
    gpus: int,
    *,
    goodput: Goodput | None = None,
    spare_gpus: int = 0,
    price: float | None = None,
    watts: float | None = None,
    pue: float = PUE,
) -> Cost:
    """The cost of training on so many tokens, rounded up to whole steps.

    Without `goodput` nothing fails. Raises UserError for what cannot be or contradicts itself.
    """
    positive("the number of tokens", tokens, "tokens")
    positive("the tokens of a step", tokens_a_step, "tokens")
    positive("the time of a step", step_seconds, "seconds")
    whole("the number of GPUs", gpus)
    not_negative("the number of spare GPUs", spare_gpus, "GPUs")
    if tokens < tokens_a_step:
        raise UserError(
            f"{count(tokens)} tokens are less than one step of {count(tokens_a_step)}; give all tokens of the run, "
            "such as 15e12"
        )
    if goodput is not None and goodput.gpus != gpus:
        raise UserError(f"the goodput is that of {goodput.gpus:,} GPUs, and the run has {gpus:,}; take the same number")
    if price is not None:
        not_negative("the price", price, "money for a GPU and hour")
    if watts is not None:
        positive("the power of a GPU", watts, "watts")
    positive("the PUE", pue, "watts drawn for each watt computed with")
    if pue < 1:
        raise UserError(f"a PUE of {pue:g}; a data centre draws at least what its computers do, so give 1 or more")
    ettr = 1.0 if goodput is None else goodput.ettr
    steps = ceil(tokens / tokens_a_step * (1 - 1e-12))
    return Cost(tokens, steps, step_seconds, gpus, int(spare_gpus), ettr, price, watts, pue, goodput)


def cost_of(
    run: Run,
    cluster: Cluster,
    step_seconds: float,
    *,
    goodput: Goodput | None = None,
    spare_gpus: int = 0,
    pue: float = PUE,
) -> Cost:
    """The cost of a run on a cluster, at the cluster's price and its accelerators' greatest power. As `cost`."""
    a_step = run.batch.global_size * run.data.seq_len
    return cost(
        run.total_steps * a_step,
        a_step,
        step_seconds,
        cluster.gpus,
        goodput=goodput,
        spare_gpus=spare_gpus,
        price=cluster.price,
        watts=cluster.accelerator.watts,
        pue=pue,
    )
