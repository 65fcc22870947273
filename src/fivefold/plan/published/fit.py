"""Fits the planner's constants to published runs: robust least squares on the logarithm of the step time.

Small enough to leave a source out and fit again (`validate.py`); `benchmarks/fit_planner.py` writes the shipped table
with it. What is made small is the sum of the absolute errors of the rows' logarithms, by iteratively reweighted least
squares with derivatives by differences, plus a mild pull of each constant towards `PRIORS`, which decides where no row
does. Of memory one constant is fitted, the allocator's gaps, by itself. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import exp, log
from statistics import median

import numpy as np

from fivefold.plan.constants import FILE, Constants, from_table
from fivefold.plan.memory.overhead import ASK_FOR_IT
from fivefold.plan.memory.peak import GIB, memory
from fivefold.plan.published.rows import Row
from fivefold.plan.time.step import step_time

Table = dict[str, dict[str, dict[str, float]]]
Key = tuple[str, str, str]
"""families or generations, which one, and the constant's name."""

PRIORS: Table = {
    "families": {
        "A100": {"matmul": 0.82, "depth": 100, "bandwidth": 0.85, "link": 0.7, "nic": 0.8},
        "H100": {"matmul": 0.70, "depth": 200, "bandwidth": 0.85, "link": 0.7, "nic": 0.8},
        "Blackwell": {"matmul": 0.72, "depth": 300, "bandwidth": 0.85, "link": 0.7, "nic": 0.8},
    },
    "generations": {
        "unfused-2022": {
            "attention_A100": 0.7, "pointwise": 1.3, "launch": 5e-6, "overlap": 0.1, "odd_heads": 2.0, "gaps": 1.1,
        },
        "flash-2023": {
            "attention_A100": 0.28, "attention_H100": 0.15, "pointwise": 1.8, "launch": 5e-6, "overlap": 0.7,
            "narrow": 0.5,
        },
        "compiled-2024": {
            "attention_A100": 0.5, "attention_H100": 0.3, "pointwise": 1.0, "launch": 5e-6, "overlap": 0.7,
            "narrow": 0.5,
        },
        "engine-2025": {
            "attention_H100": 0.5, "pointwise": 1.0, "launch": 5e-6, "overlap": 0.7, "narrow": 0.6, "routing": 1e-3,
        },
        "engine-2026": {
            "attention_Blackwell": 0.45, "pointwise": 1.0, "launch": 4e-6, "overlap": 0.8, "narrow": 0.7,
            "routing": 3e-4,
        },
    },
}  # fmt: skip
"""What each constant plausibly is by itself: shares of datasheets that others measured, bytes of plain kernels."""

SPREAD = {
    "matmul": 0.15,
    "depth": 0.7,
    "bandwidth": 0.15,
    "link": 0.3,
    "nic": 0.3,
    "pointwise": 0.5,
    "launch": 1.0,
    "routing": 1.0,
}
"""How far, as a logarithm, a constant may stray from its prior for the price of one row that is 10 % off; else 0.5."""
OF_MEMORY = ("gaps",)
"""Constants that no time depends on."""
SHARES = ("matmul", "bandwidth", "link", "nic", "overlap", "narrow", "attention")
"""Constants that lie between 0 and 1."""
PRICE, NEAR = 0.1, 0.3
FLOOR = 0.02
"""Errors below this weigh like it: the noise of a repeated measurement."""
WEIGHTS = {"bounded": 1.0, "unstated": 0.4, "experts": 0.4}


def usable(row: Row) -> bool:
    """Whether a row can be fitted to: it says a time, and is not doubtful."""
    return row.seconds is not None and not row.doubtful


def weight(row: Row) -> float:
    """How much a row counts."""
    if not row.dense:
        return WEIGHTS["experts"]
    return WEIGHTS["bounded" if row.states.layout else "unstated"]


def fitted(
    rows: Sequence[Row],
    start: Mapping[str, Mapping[str, Mapping[str, float]]],
    rounds: int = 10,
    say: Callable[[str], None] = lambda line: None,
) -> Table:
    """The table with which the times of `rows` come out best, from the table `start`; constants of memory as they are
    there."""
    keys = _keys(start)
    point = np.array([_inward(key, start[key[0]][key[1]][key[2]]) for key in keys])
    touched = [_touched(row, keys) for row in rows]
    error = _errors(rows, keys, point)
    search = _Search(keys, rows, point, error, _slopes(rows, keys, point, error, touched))
    for number in range(rounds):
        before = search.loss
        moved = search.step()
        say(f"round {number}: loss {search.loss:.4f}, mean error {search.mean_error:.4f}")
        if not moved or before - search.loss < 1e-3 * search.loss / rounds:
            break
        search.slopes = _slopes(rows, keys, search.point, search.error, touched)
    return _table(keys, search.point, start)


def gaps(rows: Sequence[Row]) -> float:
    """Reserved over allocated bytes of allocators whose segments cannot grow: the median of what makes each row that
    says all its memory depends on come out exactly."""
    found = []
    for row in rows:
        told = row.memory_bounded and not row.doubtful and row.memory_kind in ("reserved", "nvidia-smi")
        if not told or row.memory_gib is None or row.software.name in ASK_FOR_IT:
            continue
        worst = memory(row.run, row.cluster, row.software).worst
        beside = worst.overhead.context if row.memory_kind == "nvidia-smi" else 0.0
        found.append((row.memory_gib * GIB - beside) / worst.allocated)
    return float(f"{median(found):.4g}")


class _Search:
    """Damped least squares under way: where it is, and how well that is."""

    def __init__(
        self, keys: Sequence[Key], rows: Sequence[Row], point: np.ndarray, error: np.ndarray, slopes: np.ndarray
    ) -> None:
        self._keys, self._rows = keys, rows
        self.point, self.error, self.slopes = point, error, slopes
        self._prior = np.array([_inward(key, PRIORS[key[0]][key[1]][key[2]]) for key in keys])
        self._spread = np.array([SPREAD.get(key[2], 0.5) for key in keys])
        self._weights = np.array([weight(row) for row in rows])
        self._damping = 1e-3
        self.loss = self._loss(error, point)

    @property
    def mean_error(self) -> float:
        """Weighted, of the logarithms."""
        return float(np.average(np.abs(self.error), weights=self._weights))

    def step(self) -> bool:
        """Go to a better point, and say whether there was one."""
        robust = self._weights / np.maximum(np.abs(self.error), FLOOR)
        pull = (self.point - self._prior) / self._spread
        tight = PRICE / np.maximum(np.abs(pull), NEAR) / self._spread**2
        square = self.slopes.T @ (self.slopes * robust[:, None]) + np.diag(tight)
        right = -(self.slopes.T @ (robust * self.error)) - tight * (self.point - self._prior)
        for _ in range(6):
            damped = square + self._damping * np.diag(np.diag(square))
            tried = self.point + np.clip(np.linalg.solve(damped, right), -0.5, 0.5)
            error = _errors(self._rows, self._keys, tried)
            loss = self._loss(error, tried)
            if loss < self.loss:
                self.point, self.error, self.loss = tried, error, loss
                self._damping = max(self._damping / 4, 1e-6)
                return True
            self._damping *= 5
        return False

    def _loss(self, error: np.ndarray, point: np.ndarray) -> float:
        """Absolute values, rounded off near 0 as the weights of `step` have it."""
        size, pull = np.abs(error), np.abs(point - self._prior) / self._spread
        rows = np.where(size > FLOOR, size - FLOOR / 2, size**2 / (2 * FLOOR))
        return float(self._weights @ rows + PRICE * np.where(pull > NEAR, pull - NEAR / 2, pull**2 / (2 * NEAR)).sum())


def _keys(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[Key]:
    return [
        (kind, name, key)
        for kind, named in table.items()
        for name, values in named.items()
        for key in values
        if key not in OF_MEMORY
    ]


def _is_share(key: Key) -> bool:
    return key[2].split("_")[0] in SHARES


def _inward(key: Key, value: float) -> float:
    """A number without bounds for a constant: its logarithm, or that of its odds."""
    return log(value / (1 - value)) if _is_share(key) else log(value)


def _outward(key: Key, number: float) -> float:
    return 1 / (1 + exp(-number)) if _is_share(key) else exp(number)


def _table(keys: Sequence[Key], point: np.ndarray, start: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    table: Table = {kind: {name: dict(values) for name, values in named.items()} for kind, named in start.items()}
    for key, number in zip(keys, point, strict=True):
        value = float(f"{_outward(key, float(number)):.4g}")
        table[key[0]][key[1]][key[2]] = value
    return table


def _touched(row: Row, keys: Sequence[Key]) -> list[int]:
    """The constants that a row's time depends on."""
    names = {("families", row.cluster.accelerator.family), ("generations", row.software.generation)}
    return [number for number, key in enumerate(keys) if key[:2] in names]


def _constants(keys: Sequence[Key], point: np.ndarray) -> Constants:
    table: Table = {}
    for key, number in zip(keys, point, strict=True):
        table.setdefault(key[0], {}).setdefault(key[1], {})[key[2]] = _outward(key, float(number))
    return from_table(table)


def _error(row: Row, table: Constants) -> float:
    assert row.seconds is not None, "the row is usable"
    return log(step_time(row.run, row.cluster, row.software, table).seconds / row.seconds)


def _errors(rows: Sequence[Row], keys: Sequence[Key], point: np.ndarray) -> np.ndarray:
    table = _constants(keys, point)
    return np.array([_error(row, table) for row in rows])


def _slopes(
    rows: Sequence[Row], keys: Sequence[Key], point: np.ndarray, error: np.ndarray, touched: Sequence[Sequence[int]]
) -> np.ndarray:
    """Derivatives of the errors, by a small step of each constant."""
    slopes, small = np.zeros((len(rows), len(keys))), 0.01
    tables = []
    for number in range(len(keys)):
        moved = point.copy()
        moved[number] += small
        tables.append(_constants(keys, moved))
    for place, row in enumerate(rows):
        for number in touched[place]:
            slopes[place, number] = (_error(row, tables[number]) - error[place]) / small
    return slopes


class Refit:
    """Fits without one source after the other, from the shipped table.

    The derivatives are taken once, with all rows, and the errors anew in each round: the constants move little.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        table = json.loads(FILE.read_text(encoding="utf-8"))
        self._rows = [row for row in rows if usable(row)]
        self._keys = _keys(table)
        self._start = np.array([_inward(key, table[key[0]][key[1]][key[2]]) for key in self._keys])
        self._error = _errors(self._rows, self._keys, self._start)
        touched = [_touched(row, self._keys) for row in self._rows]
        self._slopes = _slopes(self._rows, self._keys, self._start, self._error, touched)

    def without(self, source: str, rounds: int = 4) -> Constants:
        """The constants of a fit without the rows of `source`."""
        kept = [number for number, row in enumerate(self._rows) if row.source != source]
        rows = [self._rows[number] for number in kept]
        search = _Search(self._keys, rows, self._start, self._error[kept], self._slopes[kept])
        for _ in range(rounds):
            if not search.step():
                break
        return _constants(self._keys, search.point)
