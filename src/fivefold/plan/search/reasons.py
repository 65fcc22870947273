"""Why one layout is better than another: what the time and the memory of each are spent on, and the differences.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.config.run import Run
from fivefold.plan.memory.overhead import GIB
from fivefold.plan.memory.peak import CATEGORIES, Memory
from fivefold.plan.published import accuracy
from fivefold.plan.table import table_lines
from fivefold.plan.time.step import StepTime

WORDS = {
    "products": "matrix products",
    "attention": "attention",
    "pointwise": "pointwise operations",
    "gradients": "adding up gradients",
    "recompute": "recompute",
    "tp": "exchange of tp",
    "cp": "exchange of cp",
    "ep": "exchange of experts' tokens",
    "zero": "gathering and reducing for ZeRO",
    "transfer": "transfers between stages",
    "bubble": "pipeline bubble",
    "reduction": "reduction at the step's end",
    "optimizer": "optimizer",
}
"""What the parts of a step are."""
TOLD_APART = "what is faster is so by less than can be told apart, leaves less room, or has more tp or cp"
TIGHT = "*"
"""Marks what may not fit after all."""
SMALL = 0.003
"""Differences below this share of the step are not told."""


@dataclass(frozen=True)
class Layout:
    """A legal layout with what it takes."""

    run: Run
    step: StepTime
    memory: Memory

    @property
    def name(self) -> str:
        """Such as `tp 8 pp 16 dp 128, micro 1, zero 1, recompute none, 1f1b`."""
        parallel, recompute = self.run.parallel, self.run.recompute
        degrees = {axis: getattr(parallel, axis) for axis in ("tp", "cp", "pp", "ep", "dp", "replicate")}
        shown = [f"{axis} {degree}" for axis, degree in degrees.items() if degree != 1]
        schedule = f", {parallel.schedule}" + (f" x {parallel.chunks}" if parallel.chunks > 1 else "")
        return (
            f"{' '.join(shown) or 'one rank'}, micro {self.run.batch.micro_size}, zero {parallel.zero}, recompute "
            f"{recompute.mode}{f' of every {recompute.every}th' if recompute.every > 1 else ''}"
            f"{schedule if parallel.pp > 1 else ''}"
        )

    @property
    def gib(self) -> float:
        """Allocated by the fullest rank."""
        return self.memory.worst.allocated / GIB

    @property
    def tight(self) -> bool:
        """Whether it fits by less than nine of ten published runs were off in memory."""
        error = accuracy.of_memory(self.run)
        return error is not None and self.memory.is_tight(error.p90)

    def costs(self) -> str:
        """Seconds of the step by part, the largest first; of small ones nothing."""
        parts = sorted(self.step.parts.items(), key=lambda part: -part[1])
        told = [(name, seconds) for name, seconds in parts if seconds >= SMALL * self.step.seconds]
        return ", ".join(f"{WORDS.get(name, name)} {seconds / self.step.seconds:.1%}" for name, seconds in told)

    def against(self, best: Layout) -> str:
        """What it costs more and less than the best, in seconds of a step."""
        parts = differences(self.step, best.step)
        more = [f"{WORDS.get(name, name)} {seconds:+.3g} s" for name, seconds in parts.items()]
        return ", ".join(more) or "the same parts"

    def json(self, best: Layout | None = None) -> dict[str, Any]:
        """As plain values, with the differences against the best."""
        run, step = self.run, self.step
        found: dict[str, Any] = {
            "layout": self.name,
            "parallel": run.parallel.model_dump(),
            "micro_size": run.batch.micro_size,
            "recompute": run.recompute.model_dump(),
            "step_seconds": step.seconds,
            "tokens_per_s": step.tokens_per_s,
            "mfu": step.mfu,
            "bubble": step.bubble,
            "communication": step.communication,
            "exposed": step.exposed,
            "parts": step.parts,
            "memory_gib": self.gib,
            "memory_parts": self.memory.worst.parts,
            "fits": self.memory.fits,
            "tight": self.tight,
            "reasons": self.costs(),
        }
        if best is not None and best is not self:
            found["slower"] = step.seconds / best.step.seconds - 1
            found["against_best"] = differences(step, best.step)
        return found


@dataclass(frozen=True)
class Own:
    """The user's own layout: `is_` has what it takes, or the sentences of the rules that it breaks."""

    run: Run
    is_: Layout | list[str]
    best: Layout | None

    @property
    def verdict(self) -> str:
        """`illegal`, `does not fit`, `best` or `worse`."""
        if not isinstance(self.is_, Layout):
            return "illegal"
        if not self.is_.memory.fits:
            return "does not fit"
        assert self.best is not None, "it would be it"
        return "worse" if self.is_.step.seconds > self.best.step.seconds else "best"

    def json(self) -> dict[str, Any]:
        """As plain values."""
        if not isinstance(self.is_, Layout):
            return {"verdict": self.verdict, "rules": list(self.is_)}
        return {"verdict": self.verdict, **self.is_.json(self.best)}


def differences(step: StepTime, best: StepTime) -> dict[str, float]:
    """Seconds that a step spends more (or less) than another on each part, the largest first, without small ones."""
    names = dict.fromkeys([*step.parts, *best.parts])
    parts = {name: step.parts.get(name, 0.0) - best.parts.get(name, 0.0) for name in names}
    told = {name: seconds for name, seconds in parts.items() if abs(seconds) >= SMALL * best.seconds}
    return dict(sorted(told.items(), key=lambda part: -part[1]))


def table(best: Sequence[Layout]) -> list[str]:
    """The layouts beside each other, and under it what each spends its step on."""
    head = ("", "tp", "cp", "pp", "ep", "dp", "micro", "zero", "recompute", "schedule", "step s", "MFU", "bubble",
            "exposed", "GiB")  # fmt: skip
    lines = table_lines([head, *(_row(number, each) for number, each in enumerate(best, 1))])
    lines += ["", f"1: {best[0].costs()}"]
    lines += [
        f"{number}: {each.step.seconds / best[0].step.seconds - 1:+.1%}: {each.against(best[0])}"
        for number, each in enumerate(best[1:], 2)
    ]
    if any(each.step.seconds < best[0].step.seconds for each in best):
        lines += ["", f"1 is recommended: {TOLD_APART}"]
    if any(each.tight for each in best):
        lines += ["", f"{TIGHT} fits by less than nine of ten published runs were off in memory; leave some room"]
    return lines


def _row(number: int, each: Layout) -> tuple[str, ...]:
    run, step = each.run, each.step
    parallel = run.parallel
    schedule = "" if parallel.pp == 1 else parallel.schedule + (f" x {parallel.chunks}" if parallel.chunks > 1 else "")
    replicas = f" ({parallel.replicate} replicas)" if parallel.replicate > 1 else ""
    return (
        *map(str, (number, parallel.tp, parallel.cp, parallel.pp, parallel.ep, f"{parallel.dp}{replicas}")),
        *map(str, (run.batch.micro_size, parallel.zero)),
        run.recompute.mode,
        schedule,
        f"{step.seconds:.4g}",
        f"{step.mfu:.1%}",
        f"{step.bubble:.1%}",
        f"{step.exposed:.1%}",
        f"{each.gib:.1f}" + each.tight * f" {TIGHT}",
    )


def own_lines(own: Own) -> list[str]:
    """What is to be said of the user's own layout."""
    if not isinstance(own.is_, Layout):
        return ["your layout is illegal:", *(f"  {sentence}" for sentence in own.is_)]
    if own.verdict == "does not fit":
        return [f"your layout does not fit: {own.is_.name} {short_of(own.is_)}"]
    if own.verdict == "best" or own.best is None:
        return [f"your layout is the best: {own.is_.name}"]
    slower = own.is_.step.seconds / own.best.step.seconds - 1
    return [
        f"your layout ({own.is_.name}) takes {own.is_.step.seconds:.4g} s a step, {slower:.1%} more than the best: "
        f"{own.is_.against(own.best)}; its fullest rank has {own.is_.gib:.1f} GiB"
    ]


def miss_lines(miss: Layout | None) -> list[str]:
    """What comes nearest, if nothing fits."""
    if miss is None:
        return ["no layout is legal"]
    return [f"no layout fits; the nearest, {miss.name}, {short_of(miss)}"]


def short_of(layout: Layout) -> str:
    """How much memory its fullest rank lacks, and what it is spent on."""
    worst, capacity = layout.memory.worst, layout.memory.capacity
    parts = {**{name: worst.parts.get(name, 0.0) for name in CATEGORIES}, "context": worst.overhead.context}
    told = ", ".join(
        f"{name.replace('_', ' ')} {bytes / GIB:.1f}" for name, bytes in parts.items() if bytes >= 0.05 * GIB
    )
    return (
        f"needs {worst.needed / GIB:.1f} GiB on pipeline rank {worst.pp} and the accelerator has "
        f"{capacity / GIB:.1f}, {(worst.needed - capacity) / GIB:.1f} too few ({told} GiB)"
    )
