"""A forecast as tables for the terminal. Imports no torch."""

from __future__ import annotations

from fivefold.plan.figures import meanings
from fivefold.plan.forecast import Forecast
from fivefold.plan.overview import short
from fivefold.plan.quantities import percent, time
from fivefold.plan.table import table_lines

PARTS = {
    "products": "matrix products of the linear layers",
    "attention": "attention's own products",
    "pointwise": "norms, activations, rotary embedding, residuals, routing, loss",
    "gradients": "adding weight gradients to those that are there",
    "recompute": "computing activations again",
    "tp": "exchange inside layers, not hidden",
    "cp": "exchange of keys and values, not hidden",
    "ep": "exchange of tokens between experts, not hidden",
    "zero": "gathering weights and sending gradients, not hidden",
    "transfer": "transfers between stages, not hidden",
    "offload": "activations on their way to CPU memory and back, not hidden",
    "bubble": "waiting for other pipeline ranks",
    "reduction": "the last reduction and gathering, not hidden",
    "optimizer": "updating the weights",
}
"""What each part of a step is, in the order in which they are shown."""


def headline(found: Forecast) -> str:
    """The run, its accelerators and its layout."""
    run, parallel, cluster = found.run, found.run.parallel, found.cluster
    ep = f", ep {parallel.ep}" if parallel.ep > 1 else ""
    chunks = f" with {parallel.chunks} chunks" if parallel.chunks > 1 else ""
    schedule = f", {parallel.schedule}{chunks}" if parallel.pp > 1 else ""
    microbatches = (
        f"{found.microbatches:,} microbatch{'' if found.microbatches == 1 else 'es'} of {run.batch.micro_size}"
    )
    return (
        f"{cluster.gpus:,} {cluster.accelerator.name} = pp {parallel.pp} x dp {parallel.dp} x cp {parallel.cp} x tp "
        f"{parallel.tp}{ep}, ZeRO {parallel.zero}{schedule}, {microbatches}, recompute {run.recompute.mode}"
    )


def model_line(found: Forecast) -> str:
    """The model, and the batch."""
    run, budget = found.run, found.budget
    active = "" if budget.active == budget.parameters else f" ({short(budget.active)} active)"
    name = run.model.preset or run.model.from_ or run.model.family
    size = f"{short(budget.parameters)} parameters{active}, vocabulary {run.model.vocab:,}"
    a_step = run.batch.global_size * run.data.seq_len
    return f"{name}, {size}; a step is {run.batch.global_size:,} sequences x {run.data.seq_len:,} = {a_step:,} tokens"


def lines_of(found: Forecast) -> list[str]:
    """All of it."""
    rows = [(figure.title, figure.text, figure.error_text, figure.basis) for figure in found.figures]
    residual = found.execution.residual
    return [
        f"run {found.run.name} on {headline(found)}",
        model_line(found),
        *found.execution.lines(),
        "",
        *table_lines([("what", "value", "error", "basis"), *rows]),
        "",
        *time_lines(found),
        "",
        *found.memory.table(),
        found.short_verdict(),
        *([] if residual is None else ["", *residual.lines()]),
        "",
        f"error: {error_line(found)}",
        *meanings(found.figures),
        *(f"assumption: {sentence}" for sentence in found.assumptions()),
        *(f"note: {note}" for note in found.notes),
    ]


def time_rows(found: Forecast) -> list[tuple[str, float, str]]:
    """Name, seconds and meaning of each part of a step that takes any time."""
    parts = found.step.parts
    return [(name, parts[name], meaning) for name, meaning in PARTS.items() if parts.get(name, 0.0) > 0]


def time_lines(found: Forecast) -> list[str]:
    """Where the time of a step goes."""
    total = found.step.seconds
    rows = [(name, time(seconds), percent(seconds / total), what) for name, seconds, what in time_rows(found)]
    return table_lines([("a step's", "time", "share", "of the busiest pipeline rank"), *rows])


def error_line(found: Forecast) -> str:
    """What the error bars are."""
    bars = {figure.bar for figure in found.figures if figure.bar is not None}
    said = [
        f"nine of ten were within {bar.p90:.0%}, in the mean {bar.mean:.1%} off ({bar.rows} rows, {bar.of})"
        for bar in sorted(bars, key=lambda bar: bar.of, reverse=True)
    ]
    if found.execution.residual is not None:
        said.append(f"nobody tried what is {found.execution.residual.calibration.word}")
    return "; ".join(said) or "no published runs are near enough to say how far off this is"
