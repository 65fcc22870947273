"""The planner against published runs: each row predicted, and the errors by source and in total.

Step times are compared in seconds, as the absolute error relative to the measured; never TFLOP/s, whose conventions
differ. Bounded are dense rows that state micro-batch, recompute and ZeRO; rows with experts, and dense rows that leave
something unsaid, are reported apart. Where a row does not say what it recomputes, its memory is that of the lightest
mode that fits, and its time that of a run that recomputes nothing: stacks that do not say it recompute a few cheap
parts rather than whole layers. Doubtful rows are predicted and listed, and count nowhere. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import ceil, inf
from pathlib import Path
from typing import Any

from fivefold.config.run import RECOMPUTE_MODES, Recompute
from fivefold.errors import UserError
from fivefold.plan.constants import Constants, constants
from fivefold.plan.memory.peak import GIB, memory
from fivefold.plan.published.rows import UNREADABLE, Row, Unread, readable_rows
from fivefold.plan.published.source_names import short_names
from fivefold.plan.table import table_lines
from fivefold.plan.time.step import step_time

STEP_TIME, MOE, OTHER = "step_time", "step_time_moe", "step_time_other"
CLASSES = {
    STEP_TIME: "step time, dense rows that state micro-batch, recompute and ZeRO",
    MOE: "step time, rows with experts",
    OTHER: "step time, dense rows that leave some of it unsaid",
}
APART = 0.06
"""Two runs of a sweep are compared if their speeds differ by more than this: a repeated run differs by up to 5 %."""


@dataclass(frozen=True)
class Prediction:
    """What the planner says of a row."""

    row: Row
    seconds: float
    memory_gib: float | None
    """Of the fullest GPU, read as the row's figure is; None where memory could not be counted."""
    fits: bool | None
    recompute: str
    """The mode that was assumed for the memory, or stated."""

    @property
    def kind(self) -> str:
        """Which class of step times the row belongs to."""
        if not self.row.dense:
            return MOE
        return STEP_TIME if self.row.states.layout else OTHER

    @property
    def memory_bounded(self) -> bool:
        """Whether the row says all that its memory depends on."""
        return self.row.memory_bounded

    @property
    def error(self) -> float | None:
        """Of the step time, relative to the measured; above 0 if predicted too long."""
        return None if self.row.seconds is None else self.seconds / self.row.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Of the peak memory, relative to the measured."""
        if self.row.memory_gib is None or self.memory_gib is None:
            return None
        return self.memory_gib / self.row.memory_gib - 1

    def json(self) -> dict[str, Any]:
        """As plain values."""
        row = self.row
        return {
            "id": row.id,
            "source": row.source,
            "class": self.kind,
            "doubtful": row.doubtful,
            "generation": row.software.generation,
            "recompute": self.recompute,
            "recompute_stated": row.states.recompute,
            "predicted": self.seconds,
            "measured": row.seconds,
            "error": self.error,
            "memory_gib_predicted": self.memory_gib,
            "memory_gib_measured": row.memory_gib,
            "memory_kind": row.memory_kind,
            "memory_bounded": self.memory_bounded,
            "memory_error": self.memory_error,
            "fits_predicted": self.fits,
            "oom_measured": row.oom,
        }


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of some rows, as fractions."""

    mean_abs_error: float | None
    p90_abs_error: float | None
    rows: int
    by_source: dict[str, Errors] = field(default_factory=dict)

    @classmethod
    def of(cls, errors: Iterable[tuple[str, float]]) -> Errors:
        """Of pairs of source and error, in total and by source."""
        pairs = list(errors)
        sources = dict.fromkeys(source for source, _ in pairs)
        return replace(
            cls._of([error for _, error in pairs]),
            by_source={source: cls._of([error for mine, error in pairs if mine == source]) for source in sources},
        )

    @classmethod
    def _of(cls, errors: Sequence[float]) -> Errors:
        sizes = sorted(map(abs, errors))
        if not sizes:
            return cls(None, None, 0)
        return cls(sum(sizes) / len(sizes), sizes[ceil(0.9 * len(sizes)) - 1], len(sizes))

    def json(self) -> dict[str, Any]:
        """As plain values."""
        found: dict[str, Any] = {
            "mean_abs_error": self.mean_abs_error,
            "p90_abs_error": self.p90_abs_error,
            "rows": self.rows,
        }
        return found | (
            {"by_source": {name: each.json() for name, each in self.by_source.items()}} if self.by_source else {}
        )


@dataclass(frozen=True)
class Validation:
    """The planner against a file of published runs."""

    predictions: tuple[Prediction, ...]
    left_out: Errors | None = None
    """Errors of bounded rows whose source was left out of the fit, where another has that accelerator and precision."""
    unread: tuple[Unread, ...] = ()
    """Rows of which nothing can be said: an unknown accelerator, a schedule that cannot run, a size that is missing."""

    def step_time(self, kind: str) -> Errors:
        """The errors of one class of step times."""
        return Errors.of(
            (each.row.source, each.error) for each in self._sure if each.kind == kind and each.error is not None
        )

    def memory(self) -> Errors:
        """The errors of the bounded rows' peak memory."""
        return Errors.of(
            (each.row.source, each.memory_error)
            for each in self._sure
            if each.memory_bounded and each.memory_error is not None
        )

    def oom(self) -> dict[str, int]:
        """Runs that ran out of memory and are said not to fit, and runs that fitted and are said not to."""
        failed = [each for each in self._sure if each.row.oom]
        fitting = [each for each in self._sure if not each.row.oom and each.row.states.recompute]
        return {
            "recognized": sum(each.fits is False for each in failed),
            "of": len(failed),
            "wrongly_refused": sum(each.fits is False for each in fitting),
            "fitting": len(fitting),
        }

    def ordering(self) -> dict[str, int]:
        """Pairs inside a sweep (a source's runs of one model on one accelerator) whose tokens a second and GPU differ
        by more than APART, and of them those that are predicted in the right order."""
        sweeps: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
        for each in self._sure:
            if each.row.seconds is not None and each.kind != MOE:
                sweeps.setdefault(_sweep(each.row), []).append(_speeds(each))
        pairs = [pair for sweep in sweeps.values() for pair in combinations(sweep, 2)]
        apart = [(one, other) for one, other in pairs if max(one[0], other[0]) > (1 + APART) * min(one[0], other[0])]
        right = sum((one[0] > other[0]) == (one[1] > other[1]) for one, other in apart)
        return {"right": right, "of": len(apart)}

    @property
    def _sure(self) -> list[Prediction]:
        return [each for each in self.predictions if not each.row.doubtful]

    def json(self) -> dict[str, Any]:
        """All of it as plain values; errors as fractions."""
        found: dict[str, Any] = {kind: self.step_time(kind).json() for kind in CLASSES}
        found |= {"memory": self.memory().json(), "oom": self.oom(), "ordering": self.ordering()}
        if self.left_out is not None:
            found["leave_one_out"] = self.left_out.json()
        found["unread"] = [{"id": each.id, "why": each.why} for each in self.unread]
        return found | {"predictions": [each.json() for each in self.predictions]}

    def lines(self) -> list[str]:
        """For the terminal."""
        tables = {title: self.step_time(kind) for kind, title in CLASSES.items()}
        tables["peak memory, dense rows that also state the sequence"] = self.memory()
        if self.left_out is not None:
            tables["step time with the row's source left out of the fit"] = self.left_out
        names = short_names(each.row.source for each in self.predictions)
        lines = []
        for title, errors in tables.items():
            lines += [*_error_lines(title, errors, names), ""]
        oom, order = self.oom(), self.ordering()
        lines += [
            f"out of memory: {oom['recognized']} of {oom['of']} recognized; "
            f"{oom['wrongly_refused']} of {oom['fitting']} fitting runs that state their recompute wrongly refused",
            f"order inside sweeps: {order['right']} of {order['of']} pairs that differ by more than {APART:.0%} right",
        ]
        doubtful = [each for each in self.predictions if each.row.doubtful]
        if doubtful:
            rows = [(each.row.id, _percent(each.error), _percent(each.memory_error)) for each in doubtful]
            lines += ["", *table_lines([("doubtful, not counted", "time", "memory"), *rows])]
        lines += [f"not read: row {each.id}: {each.why}" for each in self.unread]
        return lines


def validate(
    file: str | Path | None = None,
    leave_one_out: bool = False,
    say: Callable[[str], None] = lambda line: None,
    table: Constants | None = None,
) -> Validation:
    """The planner against the rows of `file`, by default of those that ship with it.

    Rows of which nothing can be said are listed. Raises UserError if the file cannot be read, or if no row can.
    """
    rows, unread = readable_rows(file)
    predictions = []
    for row in rows:
        try:
            predictions.append(predicted(row, table or constants()))
        except UNREADABLE as error:
            unread.append(Unread.of(row.id, error))
    if not predictions:
        raise UserError(f"{file} has no rows" if not unread else f"{file}, row {unread[0].id}: {unread[0].why}")
    left_out = _left_out(predictions, say) if leave_one_out else None
    return Validation(tuple(predictions), left_out, tuple(unread))


def predicted(row: Row, table: Constants) -> Prediction:
    """What the planner says of a row. Raises UserError if that is no time or no memory."""
    seconds = step_time(row.run, row.cluster, row.software, table).seconds
    modes = (row.run.recompute,) if row.states.recompute else tuple(Recompute(mode=mode) for mode in RECOMPUTE_MODES)
    for recompute in modes:
        found = memory(row.run.model_copy(update={"recompute": recompute}), row.cluster, row.software)
        if found.fits:
            break
    held = found.read_as(row.memory_kind) / GIB
    if not (0 < seconds < inf and 0 < held < inf):
        raise UserError(f"its step comes to {seconds:g} s and its memory to {held:g} GiB, which no run takes")
    return Prediction(row, seconds, held, found.fits, recompute.mode)


def _left_out(predictions: Sequence[Prediction], say: Callable[[str], None]) -> Errors:
    """Each source's bounded rows with constants that were fitted without that source."""
    from fivefold.plan.published.fit import Refit

    rows = [each.row for each in predictions]
    refit = Refit(rows)
    errors = []
    for source in dict.fromkeys(row.source for row in rows):
        bounded = [row for row in rows if row.source == source and row.dense and row.states.layout and not row.doubtful]
        others = {_coverage(row) for row in rows if row.source != source and row.seconds is not None}
        covered = [row for row in bounded if row.seconds is not None and _coverage(row) in others]
        if not covered:
            continue
        table = refit.without(source)
        found = [(source, row, step_time(row.run, row.cluster, row.software, table).seconds) for row in covered]
        errors += [(name, seconds / row.seconds - 1) for name, row, seconds in found if row.seconds]
        say(f"left out {source}: {len(covered)} rows")
    return Errors.of(errors)


def _coverage(row: Row) -> tuple[str, str]:
    """The accelerator, and the precision of the linear layers' products."""
    linear = row.run.precision.linear
    return row.cluster.accelerator.name, "16-bit" if linear == "auto" else linear.split("-")[0]


def _sweep(row: Row) -> tuple[Any, ...]:
    model = row.run.model
    return (row.source, row.cluster.accelerator.name, model.layers, model.hidden, model.heads, model.ffn)


def _speeds(each: Prediction) -> tuple[float, float]:
    """Tokens a second and GPU, measured and predicted."""
    run, measured = each.row.run, each.row.seconds
    assert measured is not None, "the row has a time"
    tokens = run.batch.global_size * run.data.seq_len / each.row.cluster.gpus
    return tokens / measured, tokens / each.seconds


def _error_lines(title: str, errors: Errors, names: Mapping[str, str]) -> list[str]:
    rows = [
        (names[name], str(each.rows), _percent(each.mean_abs_error), _percent(each.p90_abs_error))
        for name, each in errors.by_source.items()
    ]
    total = ("in total", str(errors.rows), _percent(errors.mean_abs_error), _percent(errors.p90_abs_error))
    return table_lines([(title, "rows", "mean error", "90th percentile"), *rows, total])


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
