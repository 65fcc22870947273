"""What the fields of a published run may hold, and what they must be to each other.

A row is checked before anything is made of it: one that cannot be meant is told with its numbers, and hinders no other.
The bounds are wide, and there so that no slip of the pen is planned for minutes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import Any

from fivefold.errors import UserError

LONGEST = 500
"""Characters of a text in which words and numbers are looked for."""


@dataclass(frozen=True)
class Kind:
    """What a field holds. Null is what every field holds that is not said."""

    should: str
    """In words, behind "should be"."""
    read: Callable[[Any], Any]
    """The value as it is used from here on; None if it is not of the kind."""

    def __or__(self, other: Kind) -> Kind:
        def read(value: Any) -> Any:
            found = self.read(value)
            return other.read(value) if found is None else found

        return Kind(f"{self.should}, or {other.should}", read)


def whole(low: int, high: int) -> Kind:
    """A whole number; 8.0 is one too."""

    def read(value: Any) -> int | None:
        integral = type(value) is int or (isinstance(value, float) and value.is_integer())
        return int(value) if integral and low <= value <= high else None

    return Kind(f"a whole number from {low:,} to {high:,}", read)


def number(low: float, high: float) -> Kind:
    """A number."""

    def read(value: Any) -> float | None:
        return float(value) if type(value) in (int, float) and low <= value <= high else None

    return Kind(f"a number from {low:g} to {high:g}", read)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST


def _is_line(value: Any) -> bool:
    """Whether it can be printed in a line: no break, and no half of a character of UTF-16."""
    return (
        _is_text(value) and len(value.splitlines()) == 1 and not any("\ud800" <= letter <= "\udfff" for letter in value)
    )


SECTION = Kind("an object", lambda value: dict(value) if isinstance(value, Mapping) else None)
PROSE = Kind("text", lambda value: value if isinstance(value, str) else None)
TEXT = Kind(f"text of up to {LONGEST:,} characters", lambda value: value if _is_text(value) else None)
LINE = Kind(f"one line of up to {LONGEST:,} characters", lambda value: value if _is_line(value) else None)
FLAG = Kind("true or false", lambda value: value if isinstance(value, bool) else None)
NAMES = Kind(
    "a list of names",
    lambda value: value if isinstance(value, list) and all(isinstance(each, str) for each in value) else None,
)
COUNT = whole(1, 1_000_000)
SOME = whole(0, 1_000_000)
MANY = whole(1, 1_000_000_000)
SECONDS = number(1e-6, 1e9)
SPEED = number(1e-6, 1e12)
GIBIBYTES = number(1e-6, 1e6)

LATENT = {"": SECTION, ".q_lora": COUNT, ".kv_lora": COUNT, ".qk_nope": COUNT, ".qk_rope": COUNT, ".v": COUNT}

FIELDS: dict[str, Kind] = {
    "id": LINE | whole(0, 10**18),
    "source": LINE,
    "notes": PROSE,
    "unchecked_fields": NAMES,
    "doubtful": FLAG,
    "model": SECTION,
    "model.layers": whole(1, 2_000),
    "model.hidden": COUNT,
    "model.heads": COUNT,
    "model.kv_heads": COUNT,
    "model.head_dim": COUNT,
    "model.ffn": COUNT,
    "model.vocab": MANY,
    "model.seq": MANY,
    "model.attention": TEXT,
    "model.act": TEXT,
    "model.dropout": FLAG,
    "model.bias": FLAG,
    "model.tied": FLAG,
    "model.sliding_window": TEXT | SOME,
    **{f"model.mla{name}": kind for name, kind in LATENT.items()},
    "model.moe": SECTION,
    "model.moe.n_experts": COUNT,
    "model.moe.topk": COUNT,
    "model.moe.moe_ffn": COUNT,
    "model.moe.n_shared": SOME,
    "model.moe.first_dense": SOME,
    "model.moe.mtp": whole(0, 100),
    "model.moe.head_dim": COUNT,
    "model.moe.sliding_window": TEXT | SOME,
    **{f"model.moe.mla{name}": kind for name, kind in LATENT.items()},
    "hardware": SECTION,
    "hardware.gpu": LINE,
    "hardware.count": COUNT,
    "hardware.per_node": COUNT,
    "hardware.intra": TEXT,
    "hardware.inter": TEXT,
    "layout": SECTION,
    "layout.tp": COUNT,
    "layout.pp": whole(1, 128),
    "layout.cp": COUNT,
    "layout.ep": COUNT,
    "layout.dp": COUNT,
    "layout.sp": FLAG,
    "layout.async_tp": FLAG,
    "layout.vpp": whole(1, 2_000) | TEXT,
    "layout.schedule": TEXT,
    "layout.zero": whole(0, 3) | TEXT,
    "layout.zero_group": COUNT,
    "layout.fsdp_group": COUNT,
    "layout.micro_batch": COUNT,
    "layout.global_batch": MANY,
    "layout.recompute": TEXT,
    "layout.precision": TEXT,
    "layout.framework": TEXT,
    "measured": SECTION,
    "measured.iter_s": SECONDS,
    "measured.tok_s_gpu": SPEED,
    "measured.samples_gpu_s": SPEED,
    "measured.mem_gib": GIBIBYTES,
    "measured.peak_mem_gb": GIBIBYTES,
    "measured.oom": FLAG,
}
"""What is read of a row; other fields may hold anything."""

NEEDED = {
    "id", "source", "model", "hardware", "layout", "hardware.gpu", "hardware.count",
    *(f"model.{name}" for name in ("layers", "hidden", "heads", "ffn", "seq")),
    *(f"model.moe.{name}" for name in ("n_experts", "topk", "moe_ffn")),
    *(f"model.{where}mla.{name}" for where in ("", "moe.") for name in ("kv_lora", "qk_nope", "qk_rope", "v")),
}  # fmt: skip
"""Fields that must be said where their section is."""


def name_of(row: Any, number: int) -> str:
    """By what to call a row of a file: its id, or its number if it has none."""
    name = None if not isinstance(row, Mapping) else FIELDS["id"].read(row.get("id"))
    return str(number if name is None else name)


def checked(row: Any) -> dict[str, Any]:
    """A row with each field as it is used. Raises UserError with the first one that cannot be meant."""
    if not isinstance(row, Mapping):
        raise UserError(f"it is {short_repr(row)}, and should be an object; the schema is that of published_runs.json")
    sections = {"": dict(row)}
    for path, kind in FIELDS.items():
        where, _, name = path.rpartition(".")
        if where not in sections:
            continue
        value = sections[where].get(name)
        if value is None and path in NEEDED:
            raise UserError(f"{path} is not given, and should be {kind.should}")
        if value is None:
            continue
        read = kind.read(value)
        if read is None:
            raise UserError(f"{path} is {short_repr(value)}, and should be {kind.should}")
        sections[where][name] = read
        if kind is SECTION:
            sections[path] = read
    _check_model(sections["model"])
    return sections[""]


def _check_model(model: Mapping[str, Any]) -> None:
    """Raises UserError if a model's sizes contradict each other."""
    heads, kv_heads, moe = model["heads"], model.get("kv_heads") or model["heads"], model.get("moe") or {}
    if heads % kv_heads:
        raise UserError(f"heads = {heads:,} are no multiple of kv_heads = {kv_heads:,}")
    if model["hidden"] < heads and not (model.get("head_dim") or moe.get("head_dim")):
        raise UserError(f"hidden = {model['hidden']:,} is less than heads = {heads:,}, and no head_dim is given")
    if not moe:
        return
    if moe["topk"] > moe["n_experts"]:
        raise UserError(f"topk = {moe['topk']:,} is more than n_experts = {moe['n_experts']:,}")
    if (dense := moe.get("first_dense") or 0) > model["layers"]:
        raise UserError(f"first_dense = {dense:,} is more than layers = {model['layers']:,}")
