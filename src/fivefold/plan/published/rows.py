"""Published training runs as rows of a file: each as the run, cluster and software to be asked about.

The schema is that of `published_runs.json` beside this file, whose rows were gathered from public tables and name their
source. What a row leaves unsaid has a documented default (`run.py`), and `States` tells what it did say. Imports no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.plan.cluster import Cluster
from fivefold.plan.published.fields import checked, name_of
from fivefold.plan.published.run import cluster_of_row, run_of_row
from fivefold.plan.published.software import software_of_row
from fivefold.plan.software import Software

SHIPPED = Path(__file__).with_name("published_runs.json")
"""The validation set that comes with the package."""

DOUBTFUL = (
    "bigscience-037-*",
    "bigscience-014-*",
    "bigscience-052-*",
    "bigscience-107-*-OOM",
    "tt-8b-h200-4n",
    "tt-8b-h200-8n",
    "mbridge-mem-moonlight-*",
    "mbridge-mem-llama3-70b-sft-mlp*",
    "mbridge-Qwen3_30B*-B200-MXFP8-*-mb1-*-26.02",
    "mbridge-Qwen3_235B*-GB300-BF16-*-25.11",
    "mbridge-GPT_OSS_120B-*GB200-BF16-*-25.11",
    "mosaic-140-*",
)
"""Rows of the shipped file that contradict near twins or themselves; listed, and neither fitted nor bounded."""

UNREADABLE = (UserError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What a row may come to that nobody foresaw, beside what is told of it with reason: it hinders no other row."""

MEMORY_KINDS = {"bigscience": "nvidia-smi", "internevo": "nvidia-smi", "tt": "reserved", "mbridge": "allocated"}
"""What a memory figure is, by the beginning of a row's id; elsewhere it is not said."""


@dataclass(frozen=True)
class States:
    """What a row says itself."""

    micro_batch: bool
    recompute: bool
    zero: bool
    sequence: bool
    state_bytes: bool
    """Whether the bytes a parameter of its software are known."""

    @property
    def layout(self) -> bool:
        """Whether micro-batch, recompute and ZeRO are all stated: such rows are bounded."""
        return self.micro_batch and self.recompute and self.zero


@dataclass(frozen=True)
class Row:
    """One published run."""

    id: str
    source: str
    run: Run
    cluster: Cluster
    software: Software
    seconds: float | None
    """Measured, of an optimizer step."""
    memory_gib: float | None
    """Measured peak of the fullest GPU."""
    memory_kind: str
    """`nvidia-smi`, `reserved`, `allocated` or `unstated`."""
    oom: bool
    """Whether it ran out of memory."""
    states: States
    doubtful: bool

    @property
    def dense(self) -> bool:
        """Whether the model has no experts."""
        return self.run.model.moe is None

    @property
    def memory_bounded(self) -> bool:
        """Whether it says all that its memory depends on."""
        return self.states.layout and self.states.sequence and self.states.state_bytes and self.dense and not self.oom


@dataclass(frozen=True)
class Unread:
    """A row of which nothing can be said."""

    id: str
    why: str

    @classmethod
    def of(cls, id: str, error: Exception) -> Unread:
        """By what went wrong with it, in one line."""
        said = " ".join(str(error).split())
        return cls(id, said if isinstance(error, UserError) else f"nothing can be made of it: {said or repr(error)}")


def read_rows(file: str | Path | None = None) -> list[Row]:
    """The rows of `file`, by default of the shipped one.

    Raises UserError if it cannot be read, is no list of rows, or if a row lacks what the schema requires.
    """
    rows, unread = readable_rows(file)
    if unread:
        raise UserError(f"{file or SHIPPED}, row {unread[0].id}: {unread[0].why}")
    return rows


def readable_rows(file: str | Path | None = None) -> tuple[list[Row], list[Unread]]:
    """The rows of `file`, and those of which nothing can be made: they lack or contradict what the schema requires.

    Raises UserError if the file cannot be read, or is no list of rows.
    """
    path = SHIPPED if file is None else Path(file)
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    except RecursionError as error:
        raise UserError(f"{path} is nested too deep for a list of published runs") from error
    if not isinstance(found, list):
        raise UserError(f"{path} holds a {type(found).__name__}, and no list of published runs")
    rows: list[Row] = []
    unread: list[Unread] = []
    for number, row in enumerate(found):
        try:
            rows.append(row_of(row))
        except UNREADABLE as error:
            unread.append(Unread.of(name_of(row, number), error))
    return rows, unread


def row_of(given: Any) -> Row:
    """One row of the schema. Raises UserError where it is not of the schema, or contradicts itself."""
    row = checked(given)
    layout, measured, model = row["layout"], row.get("measured") or {}, row["model"]
    unchecked = row.get("unchecked_fields") or []
    software = software_of_row(row)
    recompute = layout.get("recompute")
    return Row(
        id=str(row["id"]),
        source=str(row["source"]),
        run=run_of_row(row),
        cluster=cluster_of_row(row),
        software=software,
        seconds=_seconds(row),
        memory_gib=_first(measured, "mem_gib", "peak_mem_gb"),
        memory_kind=next(
            (kind for start, kind in MEMORY_KINDS.items() if str(row["id"]).startswith(start)), "unstated"
        ),
        oom=bool(measured.get("oom")),
        states=States(
            micro_batch=layout.get("micro_batch") is not None,
            recompute=recompute is not None and not str(recompute).endswith("?"),
            zero=layout.get("zero") is not None,
            sequence=model.get("seq") is not None and "seq" not in unchecked,
            state_bytes=not str(row["id"]).startswith("mbridge"),
        ),
        doubtful=any(fnmatch(str(row["id"]), pattern) for pattern in DOUBTFUL) or bool(row.get("doubtful")),
    )


def _seconds(row: Mapping[str, Any]) -> float | None:
    """Of a step: as measured, or from tokens or samples a second. Never from TFLOP/s, whose conventions differ."""
    measured = row.get("measured") or {}
    if (seconds := _first(measured, "iter_s")) is not None:
        return seconds
    batch, gpus = row["layout"].get("global_batch"), row["hardware"]["count"]
    if batch is None:
        return None
    if tokens := _first(measured, "tok_s_gpu"):
        return float(batch * row["model"]["seq"] / (tokens * gpus))
    samples = _first(measured, "samples_gpu_s")
    return None if not samples else float(batch / (samples * gpus))


def _first(measured: Mapping[str, Any], *keys: str) -> float | None:
    return next((float(measured[key]) for key in keys if measured.get(key) is not None), None)


def sources(rows: Sequence[Row]) -> list[str]:
    """The sources, in the order in which they come."""
    return list(dict.fromkeys(row.source for row in rows))
