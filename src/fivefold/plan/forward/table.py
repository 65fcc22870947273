"""A forward pass as figures, as tables for the terminal, and as formulas with their numbers. Imports no torch."""

from __future__ import annotations

from fivefold.plan.explain import rate_lines
from fivefold.plan.figures import BASES, Figure
from fivefold.plan.forecast_table import PARTS
from fivefold.plan.forward.forecast import Forward
from fivefold.plan.memory.overhead import GIB
from fivefold.plan.overview import short
from fivefold.plan.quantities import count, formula, percent, time
from fivefold.plan.table import table_lines

ERROR = (
    "no forward pass is among the published runs that bound errors; one is known, Llama 3 405B over a million tokens "
    "on 128 H100 in 77 s, and docs/planning.md tells how far off the plan of it is"
)
"""What is said of errors."""


def forward_figures(found: Forward) -> tuple[Figure, ...]:
    """All figures of a pass, in the order in which they are told."""
    return (*_speed(found), *_memory(found), *_work(found))


def _speed(found: Forward) -> list[Figure]:
    took, gpus, basis = found.time, found.cluster.gpus, found.rates_basis
    seconds, rate = time(took.seconds), count(found.tokens_per_s)
    a_gpu = count(found.tokens_per_s / gpus)
    busy = took.seconds - took.parts["bubble"]
    shares = {
        "bubble": ("the busiest rank's idle seconds", took.parts["bubble"]),
        "communication": ("its seconds, hidden or not,", took.communication),
        "exposed": ("its seconds, hidden ones left out,", took.exposed),
    }
    mfu = f"{found.flops:.4g} / ({seconds} x {gpus:,} x {found.peak:.4g})"
    return [
        Figure("pass_seconds", "time of the pass", took.seconds, "s", seconds, basis,
               formula("time of the pass", "microbatches of the busiest pipeline rank + bubble",
                       f"{busy:.4g} + {took.parts['bubble']:.4g} s", seconds)),
        Figure("tokens_per_s", "tokens/s", found.tokens_per_s, "tokens/s", rate, basis,
               formula("tokens/s", "tokens of the pass / its time", f"{found.tokens:,} / {seconds}", rate)),
        Figure("tokens_per_s_gpu", "tokens/s a GPU", found.tokens_per_s / gpus, "tokens/s", a_gpu, basis,
               formula("tokens/s a GPU", "tokens/s / GPUs", f"{rate} / {gpus:,}", a_gpu)),
        Figure("mfu", "MFU", found.mfu, "fraction", percent(found.mfu), basis,
               formula("MFU", "FLOPs of the pass / (time x GPUs x peak)", mfu, percent(found.mfu))),
        *(
            Figure(name, title, part / took.seconds, "fraction", percent(part / took.seconds), basis,
                   formula(title, f"{what} / time of the pass", f"{part:.4g} / {took.seconds:.4g}",
                           percent(part / took.seconds)))
            for (name, (what, part)), title in zip(
                shares.items(), ("bubble", "communication", "exposed communication"), strict=True
            )
        ),
    ]  # fmt: skip


def _memory(found: Forward) -> list[Figure]:
    worst, capacity = found.memory.worst, found.memory.capacity
    over = worst.overhead
    rows = (
        ("memory_allocated", "memory in tensors", worst.allocated, f"pipeline rank {worst.pp}, the sum"),
        ("memory_reserved", "memory reserved", worst.reserved, f"in tensors x {over.reserved:.2f}"),
        ("memory_nvidia_smi", "memory nvidia-smi shows", worst.nvidia_smi, f"reserved + {over.context / GIB:.2f} GiB"),
        ("memory_weights", "weights", worst.parts["weights"], "of that rank"),
        ("memory_keys_and_values", "keys and values", worst.parts["keys_and_values"], "of that rank, of all tokens"),
    )
    figures = [_gib(name, title, value, "assumed", f"{title} = {how}") for name, title, value, how in rows]
    name = found.cluster.accelerator.name
    return [*figures, _gib("memory_capacity", "memory of a GPU", capacity, "catalogued", f"memory of a GPU, {name}")]


def _gib(name: str, title: str, value: float, basis: str, how: str) -> Figure:
    text = f"{value / GIB:.2f} GiB"
    return Figure(name, title, value, "bytes", text, basis, f"{how} = {text}")


def _work(found: Forward) -> list[Figure]:
    hours = found.time.seconds / 3600 * found.cluster.gpus
    tokens, a_token = count(found.tokens), found.flops / found.tokens
    sizes = f"{found.run.batch.global_size:,} x {found.run.data.seq_len:,}"
    parameters = count(found.parameters)
    return [
        Figure("parameters", "parameters", found.parameters, "", parameters, "exact",
               f"parameters = {parameters} = {found.parameters:,}"),
        Figure("tokens", "tokens", found.tokens, "tokens", tokens, "given",
               formula("tokens", "sequences x tokens of one", sizes, tokens)),
        Figure("flops", "FLOPs", found.flops, "FLOP", f"{found.flops:.4g}", "exact",
               formula("FLOPs", "FLOPs a token x tokens", f"{a_token:.4g} x {tokens}", f"{found.flops:.4g}")),
        Figure("gpu_hours", "GPU-hours", hours, "h", count(hours), found.rates_basis,
               formula("GPU-hours", "time of the pass x GPUs", f"{time(found.time.seconds)} x {found.cluster.gpus:,}",
                       count(hours))),
    ]  # fmt: skip


def head_lines(found: Forward) -> list[str]:
    """The run, its accelerators, its layout and what passes."""
    run, parallel, cluster = found.run, found.run.parallel, found.cluster
    ep = f", ep {parallel.ep}" if parallel.ep > 1 else ""
    zero = ", ZeRO 3" if parallel.zero == 3 else ""
    name = run.model.preset or run.model.from_ or run.model.family
    return [
        f"forward of {run.name} on {cluster.gpus:,} {cluster.accelerator.name} = pp {parallel.pp} x dp {parallel.dp} x "
        f"cp {parallel.cp} x tp {parallel.tp}{ep}{zero}, {found.microbatches:,} microbatch"
        f"{'' if found.microbatches == 1 else 'es'} of {run.batch.micro_size}",
        f"{name}, {short(found.parameters)} parameters; {run.batch.global_size:,} sequence"
        f"{'' if run.batch.global_size == 1 else 's'} x {run.data.seq_len:,} = {found.tokens:,} tokens pass",
        *found.execution.lines(),
    ]


def lines_of(found: Forward) -> list[str]:
    """All of it for a terminal."""
    used = {figure.basis for figure in found.figures}
    return [
        *head_lines(found),
        "",
        *table_lines([("what", "value", "basis"), *((each.title, each.text, each.basis) for each in found.figures)]),
        "",
        *_time_lines(found),
        "",
        *found.memory.table(),
        found.short_verdict(),
        "",
        f"error: {ERROR}",
        *(f"{basis}: {meaning}" for basis, meaning in BASES.items() if basis in used),
        *(f"assumption: {sentence}" for sentence in found.assumptions()),
        *(f"note: {note}" for note in found.notes),
    ]


def _time_lines(found: Forward) -> list[str]:
    rows = [(name, time(s), percent(s / found.time.seconds), what) for name, s, what in _parts(found)]
    return table_lines([("a pass's", "time", "share", "of the busiest pipeline rank"), *rows])


def _parts(found: Forward) -> list[tuple[str, float, str]]:
    parts = found.time.parts
    return [(name, parts[name], what) for name, what in PARTS.items() if parts.get(name, 0.0) > 0]


def explanation(found: Forward) -> list[str]:
    """Each figure's formula with its numbers, and the rates that were reckoned with."""
    took, microbatches = found.time, found.microbatches
    lines = [*head_lines(found), "", "figures"]
    lines += [f"  {figure.formula}  [{figure.basis}]" for figure in found.figures]
    lines += ["", "time"]
    lines += [
        f"  {name}{'' if name == 'bubble' else f' = {microbatches:,} microbatches x {time(s / microbatches)}'} = "
        f"{time(s)}: {what}"
        for name, s, what in _parts(found)
    ]
    terms = " + ".join(f"{seconds:.4g}" for seconds in took.parts.values())
    lines.append(f"  {formula('time of the pass', 'sum of the parts', terms, time(took.seconds))}")
    if len(took.stages) > 1:
        lines.append(f"  a transfer between stages = {time(took.hop)}")
    lines += ["", "rates", *(f"  {line}" for line in rate_lines(found))]
    lines += ["", "memory", *(f"  {line}" for line in found.memory.explanation()), f"  {found.short_verdict()}"]
    lines += ["", *(f"assumption: {sentence}" for sentence in found.assumptions()), f"error: {ERROR}"]
    return lines
