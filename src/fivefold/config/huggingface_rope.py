"""Rope settings of a config.json, in either style, to and from `rope_theta` and `rope_scaling` of the run file.

transformers 4 writes `rope_theta` beside a `rope_scaling` table, transformers 5 one table `rope_parameters` that holds
theta too; the type is called `rope_type`, or `type` in old files. A setting left unread falls back to a default and
only long positions drift, so both places are read, and a contradiction or an unknown word is refused.
"""

from __future__ import annotations

import math
from typing import Any

from fivefold.config.huggingface_checks import is_number
from fivefold.config.run import Model, RopeScaling

_KEYS = {
    "default": {},
    "linear": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
"""What each type may hold besides its name and theta."""


def rope_fields(
    config: dict[str, Any], context: int, problems: list[str], default_theta: float = 10000.0
) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` (a table of `RopeScaling`'s fields, or None) of a config.json.

    What cannot be represented is appended to `problems`; the result is then of no use. Source of the meanings:
    transformers' modeling_rope_utils.py; YaRN is Peng et al. 2023.
    """
    tables = _tables(config)
    for key, table in tables.items():
        if not isinstance(table, dict) or any(isinstance(value, dict) for value in table.values()):
            problems.append(f"{key} {table!r}: one table for all layers is wanted")
            return {}
    theta = _one_theta(config, tables, problems, default_theta)
    kinds = {key: _kind(key, table, problems) for key, table in tables.items()}
    if len(set(kinds.values())) > 1:
        problems.append(f"the rope type is {' and '.join(f'{kind!r} in {key}' for key, kind in kinds.items())}")
        return {}
    if config.get("partial_rotary_factor") not in (None, 1):
        problems.append(f"partial_rotary_factor {config['partial_rotary_factor']}: the whole head is rotated")
    kind = next(iter(kinds.values()), "default")
    settings = _one_table(tables, problems)
    if kind is None or not _known(kind, settings, problems):
        return {}
    return {"rope_theta": theta, "rope_scaling": _scaling(kind, settings, config, context, problems)}


def latent_rope_fields(config: dict[str, Any], context: int, problems: list[str]) -> dict[str, Any]:
    """As `rope_fields`, for latent attention, where YaRN's mscale_all_dim scales attention's scores as well.

    So the pair stays what it is and does not become an attention_factor. One of the two alone means one thing to
    transformers and another to DeepSeek's own code, so it is a problem; mscale 1 alone means the same to both.
    """
    fields = rope_fields(config, context, problems)
    scaling = fields.get("rope_scaling")
    if scaling is None or scaling["type"] != "yarn":
        return fields
    settings = {key: value for table in _tables(config).values() for key, value in table.items()}
    pair = {key: settings.get(key) or None for key in ("mscale", "mscale_all_dim")}
    if pair == {"mscale": 1, "mscale_all_dim": None}:
        pair["mscale"] = None
    if None in pair.values() and set(pair.values()) != {None}:
        problems.append(f"yarn with {' and '.join(f'{key} {value}' for key, value in pair.items())}: give both")
    return fields | {"rope_scaling": scaling | pair | {"attention_factor": settings.get("attention_factor")}}


def hf_rope(model: Model) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` and `rope_parameters` of a model, both styles with equal values."""
    scaling = model.rope_scaling
    if scaling is None:
        parameters = {"rope_type": "default", "rope_theta": model.rope_theta}
        return {"rope_theta": model.rope_theta, "rope_scaling": None, "rope_parameters": parameters}
    table: dict[str, Any] = {"rope_type": scaling.type, "factor": scaling.factor}
    if scaling.type in ("llama3", "yarn"):
        table["original_max_position_embeddings"] = _original(scaling, model)
    if scaling.type == "llama3":
        table |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.type == "yarn":
        table |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        optional = {key: getattr(scaling, key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        table |= {key: value for key, value in optional.items() if value is not None}
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": table,
        "rope_parameters": table | {"rope_theta": model.rope_theta},
    }


def _original(scaling: RopeScaling, model: Model) -> int:
    return model.context if scaling.original_context is None else scaling.original_context


def _kind(key: str, table: dict[str, Any], problems: list[str]) -> str | None:
    named = {str(table[name]) for name in ("rope_type", "type") if table.get(name) is not None}
    if len(named) > 1:
        problems.append(f"{key} has rope_type {table['rope_type']!r} and type {table['type']!r}")
        return None
    if not named and table.get("factor") is not None:
        problems.append(f"{key} has a factor ({table['factor']}) but no rope_type")
        return None
    return named.pop() if named else "default"


def _tables(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rope tables that a file has, by their keys."""
    return {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}


def _one_theta(config: dict[str, Any], tables: dict[str, dict[str, Any]], problems: list[str], default: float) -> float:
    places = {"config.json": config} | tables
    found = {place: table["rope_theta"] for place, table in places.items() if table.get("rope_theta") is not None}
    if wrong := [f"{theta!r} in {place}" for place, theta in found.items() if not is_number(theta)]:
        problems.append(f"rope_theta is no number: {', '.join(wrong)}")
        return default
    if len(set(found.values())) > 1:
        problems.append(f"rope_theta is {', '.join(f'{theta} in {place}' for place, theta in found.items())}")
    return float(next(iter(found.values()), default))


def _one_table(tables: dict[str, dict[str, Any]], problems: list[str]) -> dict[str, Any]:
    """The settings of all tables joined, without type and theta; a setting that differs between them is a problem."""
    joined: dict[str, Any] = {}
    for table in tables.values():
        for key, value in table.items():
            if key in ("rope_type", "type", "rope_theta") or value is None:
                continue
            if joined.setdefault(key, value) != value:
                problems.append(f"{key} is {joined[key]} in rope_scaling and {value} in rope_parameters")
    return joined


def _known(kind: str, settings: dict[str, Any], problems: list[str]) -> bool:
    if kind not in _KEYS:
        problems.append(f"rope type {kind!r}; known are {', '.join(_KEYS)}")
        return False
    if settings.get("partial_rotary_factor") == 1:
        del settings["partial_rotary_factor"]
    unread = sorted(set(settings) - set(_KEYS[kind]))
    if unread:
        problems.append(f"rope type {kind!r} with {', '.join(f'{key} {settings[key]!r}' for key in unread)}")
    wrong = [f"{key} {value!r}" for key, value in settings.items() if not is_number(value) and key != "truncate"]
    if wrong:
        problems.append(f"rope settings that are no numbers: {', '.join(wrong)}")
    return not unread and not wrong


def _scaling(
    kind: str, settings: dict[str, Any], config: dict[str, Any], context: int, problems: list[str]
) -> dict[str, Any] | None:
    if kind == "default":
        return None
    factor = settings.get("factor")
    if kind == "linear":
        return {"type": kind, "factor": _needed(kind, "factor", factor, problems)}
    inside = settings.get("original_max_position_embeddings")
    outside = config.get("original_max_position_embeddings")
    if None not in (inside, outside) and inside != outside:
        problems.append(f"original_max_position_embeddings is {outside} in config.json and {inside} in the rope table")
    original = next((length for length in (outside, inside) if length is not None), context)
    if kind == "llama3":
        needed = ("factor", "low_freq_factor", "high_freq_factor")
        numbers = {key: _needed(kind, key, settings.get(key), problems) for key in needed}
        return {"type": kind, "original_context": original, **numbers}
    if settings.get("truncate", True) is not True:
        problems.append("yarn with truncate false: the blend starts and ends at whole dimensions")
    factor = context / original if factor is None else factor
    return {
        "type": kind,
        "factor": factor,
        "original_context": original,
        "beta_fast": settings.get("beta_fast") or 32.0,
        "beta_slow": settings.get("beta_slow") or 1.0,
        "attention_factor": _attention_factor(settings, factor),
    }


def _attention_factor(settings: dict[str, Any], factor: float) -> float | None:
    """YaRN's factor on cosine and sine, from DeepSeek's pair (mscale, mscale_all_dim) where that is given."""
    if settings.get("attention_factor") is not None:
        return settings["attention_factor"]
    top, bottom = settings.get("mscale"), settings.get("mscale_all_dim")
    if not (top and bottom) or factor <= 1:
        return None
    return (0.1 * top * math.log(factor) + 1) / (0.1 * bottom * math.log(factor) + 1)


def _needed(kind: str, key: str, value: float | None, problems: list[str]) -> float:
    if value is None:
        problems.append(f"rope type {kind!r} without {key}")
        return 1.0
    return value
