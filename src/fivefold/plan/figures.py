"""The figures of a forecast: each with its unit, where it comes from, its error bar, and its formula with its numbers.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fivefold.plan.goodput.lasting import explain_spares, says_endless
from fivefold.plan.memory.peak import GIB
from fivefold.plan.published.accuracy import Bar
from fivefold.plan.quantities import DAY, count, formula, percent, rate, size, time
from fivefold.plan.time.formats import product_format

if TYPE_CHECKING:
    from fivefold.plan.forecast import Forecast

Basis = Literal["exact", "given", "measured", "catalogued", "calibrated", "assumed"]
BASES: dict[str, str] = {
    "exact": "counted, nothing else could come out",
    "given": "the run file's",
    "measured": "by the run that the plan is calibrated on, or from rates that `fivefold bench` measured",
    "catalogued": "from the catalogue of accelerators",
    "calibrated": "by formulas whose constants were fitted on published runs",
    "assumed": "rests on an assumption that is named",
}
"""What each word means, the surest first. A figure that comes from several has the least sure one's."""
CALIBRATED_ON = "by the planner's formulas, times the factors of that run"
"""What "calibrated on RUN" means, the word of a plan that a finished run corrects."""


ENDLESS = "would not end"
"""In place of what follows from the end of a run that failures do not let come to it."""


@dataclass(frozen=True)
class Figure:
    """One number of a forecast."""

    name: str
    """Its key in the JSON."""
    title: str
    value: float | None
    unit: str
    text: str
    """The number as people write it."""
    basis: str
    """A key of `BASES`, or `calibrated on` and the name of a run."""
    formula: str
    """What it is, how it comes about, with its numbers."""
    bar: Bar | None = None
    """Errors of such a figure on published runs; None where nothing bounds it, or nothing has to."""
    is_rate: bool = False
    """Whether it is the smaller the longer the step takes."""
    why: str | None = None
    """Why it has no value, if it has none."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Between these nine of ten such figures were, if the run is like the published ones."""
        if self.bar is None or self.value is None:
            return None
        if self.is_rate:
            return self.value * (1 - self.bar.p90), self.value * (1 + self.bar.p90)
        return self.value / (1 + self.bar.p90), self.value / (1 - self.bar.p90)

    @property
    def error_text(self) -> str:
        """The error bar as people write it."""
        return "" if self.bar is None else f"+- {self.bar.p90:.0%}"

    def json(self) -> dict[str, Any]:
        """All of it as plain values."""
        interval = self.interval
        return {
            "value": self.value,
            "unit": self.unit,
            "basis": self.basis,
            "error": None if self.bar is None else self.bar.json(),
            "low": None if interval is None else interval[0],
            "high": None if interval is None else interval[1],
            **({} if self.why is None else {"why": self.why}),
        }


def meanings(figures: Iterable[Figure]) -> list[str]:
    """What the words mean from which figures come, a line each."""
    used = dict.fromkeys(figure.basis for figure in figures)
    runs = {basis: CALIBRATED_ON for basis in used if basis not in BASES}
    return [f"{basis}: {meaning}" for basis, meaning in (BASES | runs).items() if basis in used]


def figures_of(found: Forecast) -> tuple[Figure, ...]:
    """All figures of a forecast, in the order in which they are told."""
    return (*_speed(found), *_memory(found), *_length(found), *_price(found), *_disk(found))


def _speed(found: Forecast) -> list[Figure]:
    run, step, gpus = found.run, found.step, found.cluster.gpus
    basis, bar = found.rates_basis, found.time_bar
    shares = found.shares_basis
    a_step = run.batch.global_size * run.data.seq_len
    seconds = time(step.seconds)
    format = product_format(run)
    peak = found.cluster.accelerator.peak_of(format)
    work = found.budget.flops_a_token * a_step
    ends = ("bubble", "reduction", "optimizer")
    busy = sum(value for name, value in step.parts.items() if name not in ends)
    terms = [busy, *(step.parts.get(name, 0.0) for name in ends)]
    share = "seconds / time of a step"
    exposed = step.exposed * step.seconds
    moved = step.communication * step.seconds
    return [
        Figure(
            "step_seconds",
            "time of a step",
            step.seconds,
            "s",
            seconds,
            basis,
            formula(
                "time of a step",
                "microbatches of the busiest pipeline rank + bubble + reduction left over + optimizer",
                " + ".join(f"{term:.4g}" for term in terms) + " s",
                seconds,
            ),
            bar,
        ),
        Figure(
            "tokens_per_s",
            "tokens/s",
            step.tokens_per_s,
            "tokens/s",
            count(step.tokens_per_s),
            basis,
            formula("tokens/s", "tokens of a step / its time", f"{a_step:,} / {seconds}", count(step.tokens_per_s)),
            bar,
            True,
        ),
        Figure(
            "tokens_per_s_gpu",
            "tokens/s a GPU",
            step.tokens_per_s / gpus,
            "tokens/s",
            count(step.tokens_per_s / gpus),
            basis,
            formula(
                "tokens/s a GPU",
                "tokens/s / GPUs",
                f"{count(step.tokens_per_s)} / {gpus:,}",
                count(step.tokens_per_s / gpus),
            ),
            bar,
            True,
        ),
        Figure(
            "mfu",
            "MFU",
            step.mfu,
            "fraction",
            percent(step.mfu),
            basis,
            formula(
                "MFU",
                f"FLOPs of a step / (time x GPUs x peak in {format})",
                f"{work:.4g} / ({seconds} x {gpus:,} x {peak:.4g})",
                percent(step.mfu),
            ),
            bar,
            True,
        ),
        Figure(
            "bubble",
            "bubble",
            step.bubble,
            "fraction",
            percent(step.bubble),
            shares,
            formula(
                "bubble",
                f"the busiest rank's idle {share}",
                f"{step.parts.get('bubble', 0.0):.4g} / {step.seconds:.4g}",
                percent(step.bubble),
            ),
        ),
        Figure(
            "communication",
            "communication",
            step.communication,
            "fraction",
            percent(step.communication),
            shares,
            formula(
                "communication",
                f"its {share}, hidden or not",
                f"{moved:.4g} / {step.seconds:.4g}",
                percent(step.communication),
            ),
        ),
        Figure(
            "exposed",
            "exposed communication",
            step.exposed,
            "fraction",
            percent(step.exposed),
            shares,
            formula(
                "exposed communication",
                f"its {share}, hidden ones left out",
                f"{exposed:.4g} / {step.seconds:.4g}",
                percent(step.exposed),
            ),
        ),
    ]


def _memory(found: Forecast) -> list[Figure]:
    worst, capacity = found.memory.worst, found.memory.capacity
    bar, over = found.memory_bar, worst.overhead
    basis, follows = found.memory_basis, found.reserved_basis
    confidence = found.cluster.accelerator.confidence
    words = (
        ("memory_allocated", "memory in tensors", worst.allocated, basis, f"pipeline rank {worst.pp}, the sum"),
        ("memory_reserved", "memory reserved", worst.reserved, follows, f"in tensors x {over.reserved:.2f}"),
        (
            "memory_nvidia_smi",
            "memory nvidia-smi shows",
            worst.nvidia_smi,
            "assumed",
            f"reserved + {over.context / GIB:.2f} GiB",
        ),
    )
    figures = [
        Figure(
            name,
            title,
            value,
            "bytes",
            f"{value / GIB:.2f} GiB",
            basis,
            f"{title} = {how} = {value / GIB:.2f} GiB",
            bar,
        )
        for name, title, value, basis, how in words
    ]
    where = confidence.get("memory_mib", confidence.get("memory_gb", "catalogue"))
    basis = "given" if where == "given" else "catalogued"
    text = f"{capacity / GIB:.2f} GiB"
    said = f"memory of a GPU = {text} ({found.cluster.accelerator.name}: {where})"
    return [*figures, Figure("memory_capacity", "memory of a GPU", capacity, "bytes", text, basis, said)]


def _length(found: Forecast) -> list[Figure]:
    cost, budget = found.cost, found.budget
    basis, bar = found.rates_basis, found.time_bar
    tokens, flops = budget.tokens.tokens, budget.flops
    busy, days = _days(cost.busy_days), cost.calendar_days
    figures = [
        Figure(
            "parameters",
            "parameters",
            budget.parameters,
            "",
            count(budget.parameters),
            "exact",
            f"parameters = {count(budget.parameters)} = {budget.parameters:,.0f}, of which a token meets "
            f"{budget.active:,.0f}",
        ),
        Figure(
            "tokens",
            "tokens",
            tokens,
            "tokens",
            count(tokens),
            "given",
            formula(
                "tokens", "steps x tokens of a step", f"{cost.steps:,} x {tokens / cost.steps:,.0f}", count(tokens)
            ),
        ),
        Figure(
            "flops",
            "FLOPs",
            flops,
            "FLOP",
            f"{flops:.4g}",
            "exact",
            formula("FLOPs", "FLOPs a token x tokens", f"{budget.flops_a_token:.4g} x {count(tokens)}", f"{flops:.4g}"),
        ),
        Figure(
            "busy_days",
            "days of training",
            cost.busy_days,
            "days",
            busy,
            basis,
            formula(
                "days of training",
                "steps x time of a step",
                f"{cost.steps:,} x {time(cost.step_seconds)} / {DAY:,.0f} s",
                busy,
            ),
            bar,
        ),
    ]
    if days is None:
        return [
            *figures,
            _endless(found, "ettr", "useful share of time", "fraction"),
            _endless(found, "calendar_days", "calendar days", "days"),
        ]
    text = _days(days)
    share = percent(cost.ettr)
    how = f"useful share of time = ETTR, what failures leave of the time = {share}"
    return [
        *figures,
        Figure("ettr", "useful share of time", cost.ettr, "fraction", share, "assumed", how),
        Figure(
            "calendar_days",
            "calendar days",
            days,
            "days",
            text,
            "assumed",
            formula("calendar days", "days of training / ETTR", f"{busy} / {cost.ettr:.4f}", text),
            bar,
        ),
    ]


def _endless(found: Forecast, name: str, title: str, unit: str) -> Figure:
    """A figure that a run which does not end has not."""
    why = says_endless(found.run, found.cost)
    return Figure(name, title, None, unit, ENDLESS, "assumed", f"{title} = {ENDLESS}: {why}", why=why)


def _days(days: float) -> str:
    return f"{days:.4g} days" if days >= 3 else time(days * DAY)


def _price(found: Forecast) -> list[Figure]:
    cost = found.cost
    basis, bar = found.rates_basis, found.time_bar
    busy = count(cost.busy_gpu_hours)
    figures = [
        Figure(
            "busy_gpu_hours",
            "GPU-hours of training",
            cost.busy_gpu_hours,
            "h",
            busy,
            basis,
            formula(
                "GPU-hours of training",
                "days of training x 24 x GPUs",
                f"{cost.busy_days:.4g} x 24 x {cost.gpus:,}",
                busy,
            ),
            bar,
        ),
        Figure(
            "spare_gpus",
            "spare GPUs",
            cost.spare_gpus,
            "GPUs",
            f"{cost.spare_gpus:,}",
            "assumed",
            explain_spares(found.failures, cost.gpus),
        ),
    ]
    days, hours = cost.calendar_days, cost.paid_gpu_hours
    if days is None or hours is None:
        figures.append(_endless(found, "paid_gpu_hours", "GPU-hours to pay", "h"))
        figures += [_endless(found, "money", "money", "of the price")] if cost.price is not None else []
        figures += [_endless(found, "energy_kwh", "energy", "kWh")] if cost.watts is not None else []
        return figures
    paid = count(hours)
    figures.append(
        Figure(
            "paid_gpu_hours",
            "GPU-hours to pay",
            hours,
            "h",
            paid,
            "assumed",
            formula(
                "GPU-hours to pay",
                "calendar days x 24 x (GPUs + spares)",
                f"{days:.4g} x 24 x ({cost.gpus:,} + {cost.spare_gpus:,})",
                paid,
            ),
            bar,
        )
    )
    if cost.money is not None:
        text = f"{cost.money:,.0f}"
        how = formula("money", "GPU-hours to pay x price", f"{paid} x {cost.price:g}", text)
        figures.append(Figure("money", "money", cost.money, "of the price", text, "assumed", how, bar))
    if cost.energy_kwh is not None:
        text = f"{count(cost.energy_kwh / 1000)} MWh" if cost.energy_kwh >= 1000 else f"{cost.energy_kwh:.4g} kWh"
        how = formula(
            "energy", "GPU-hours to pay x watts of a GPU x PUE", f"{paid} x {cost.watts:g} W x {cost.pue:g}", text
        )
        figures.append(Figure("energy_kwh", "energy", cost.energy_kwh, "kWh", text, "assumed", how, bar))
    return figures


def _disk(found: Forecast) -> list[Figure]:
    storage = found.storage
    checkpoint, tokens = storage.checkpoint, storage.tokens
    read = storage.loaders.read
    bar = found.time_bar
    return [
        Figure(
            "checkpoint_bytes",
            "a checkpoint",
            checkpoint.bytes,
            "bytes",
            size(checkpoint.bytes),
            "exact",
            checkpoint.explain()[0],
        ),
        Figure(
            "checkpoint_bytes_kept",
            "checkpoints on disk",
            checkpoint.bytes_kept,
            "bytes",
            size(checkpoint.bytes_kept),
            "exact",
            checkpoint.explain()[1],
        ),
        Figure(
            "token_file_bytes", "token files", tokens.bytes, "bytes", size(tokens.bytes), "exact", tokens.explain()[0]
        ),
        Figure(
            "loader_bytes_per_s",
            "read by the loaders",
            read,
            "bytes/s",
            rate(read),
            found.rates_basis,
            storage.loaders.explain()[0],
            bar,
            True,
        ),
    ]
