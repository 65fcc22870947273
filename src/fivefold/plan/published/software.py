"""The software of a published run: a rule that assigns each row its generation of kernels and its stack.

A row that says how attention was computed is believed; else the stack's name in the source decides, else the year that
stands in the source (or in an arXiv number), else the accelerator. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from fivefold.hardware.catalogue import by_name
from fivefold.plan.software import COMPILED, ENGINE, FLASH, LATEST, STATES, UNFUSED, Software

STACKS: tuple[tuple[str, str, str], ...] = (
    ("korthikanti", UNFUSED, "megatron"),
    ("narayanan", UNFUSED, "megatron"),
    ("bigscience", UNFUSED, "deepspeed-2022"),
    ("turing-nlg", UNFUSED, "deepspeed-2022"),
    ("zero bubble", UNFUSED, "megatron"),
    ("mosaicml", FLASH, "fsdp1"),
    ("llm-foundry", FLASH, "fsdp1"),
    ("internevo", FLASH, "internevo"),
    ("torchtitan", COMPILED, "fsdp2"),
    ("megatron-bridge skills", LATEST, "megatron"),
    ("megatron-bridge", ENGINE, "megatron"),
    ("maxtext", ENGINE, "maxtext"),
    ("dgxc", ENGINE, "megatron"),
    ("nemo", ENGINE, "megatron"),
    ("llama 3 paper", ENGINE, "megatron"),
    ("megatron-lm", ENGINE, "megatron"),
    ("megatron-core", ENGINE, "megatron"),
)
"""A part of the source's name, the generation, and the stack; the first that fits counts."""

CAME_WITH = {"V100": UNFUSED, "A10": FLASH, "A100": FLASH}
"""The kernels of a family of accelerators where nothing else tells them; those of 2025 for newer ones."""

LATEST_RELEASE = 26.04
"""The first release of the newest generation."""

SELECTIVE: tuple[tuple[str, frozenset[str]], ...] = (
    ("attention core", frozenset({"attention"})),
    ("core_attn", frozenset({"attention"})),
    ("mla_up_proj", frozenset({"up_projection"})),
    ("mlp", frozenset({"ffn"})),
    ("moe_act", frozenset({"activation"})),
    ("layernorm", frozenset({"norm"})),
    ("op", frozenset({"norm", "activation", "rope", "half"})),
)
"""A word of what a row recomputes, and the parts of a layer that it means; torchtitan's selective `op` keeps every
second matrix product (`half`) and attention's output."""


def software_of_row(row: Mapping[str, Any]) -> Software:
    """The software of a row of the schema."""
    layout, model, source = row["layout"], row["model"], str(row["source"]).lower()
    generation, stack = _stack(row)
    precision = str(layout.get("precision") or "")
    zero = layout.get("zero")
    return Software(
        name=stack,
        generation=generation,
        state=STATES[stack],
        sequence_parallel=_sequence_parallel(layout, generation),
        dropout=_dropout(model, generation),
        selective=_selective(str(layout.get("recompute") or "")),
        overlaps_gradients=generation != UNFUSED,
        tp_overlap=_tp_overlap(layout, generation, stack),
        fused_accumulation=stack == "megatron",
        whole_transfers=stack.startswith("deepspeed"),
        ep_overlap=generation == LATEST,
        ep_once="node" if stack == "megatron" else "choice",
        reduces_each_microbatch=zero == 3 or "mosaic" in source or "PURE" in precision,
    )


def _stack(row: Mapping[str, Any]) -> tuple[str, str]:
    source = f"{row['source']} {row['layout'].get('framework') or ''}".lower()
    known = next(((generation, stack) for part, generation, stack in STACKS if part in source), None)
    generation, stack = known or (_by_age(source, row["hardware"]["gpu"]), "")
    attention = str(row["model"].get("attention") or "")
    if attention == "unfused":
        generation = UNFUSED
    elif attention.startswith("flash") and generation == UNFUSED:
        generation = FLASH
    if generation == ENGINE and _release(row) >= LATEST_RELEASE:
        generation = LATEST
    precision = str(row["layout"].get("precision") or "").lower()
    if not stack:
        stack = "fsdp2" if row["layout"].get("zero") == 3 else "megatron"
    if stack == "deepspeed-2022":
        stack += "-bf16" if precision.startswith("bf16") else "-fp16"
    if stack == "fsdp1" and "pure" in precision:
        stack = "fsdp1-pure"
    return generation, stack


def _release(row: Mapping[str, Any]) -> float:
    """Year and month (26.04) of the container release that a row was measured with; 0 if it names none."""
    text = f"{row.get('notes') or ''} {row['id']}"
    found = re.search(r"release (2\d\.\d\d)", text) or re.search(r"-(2\d\.\d\d)(?:\.\d+)?$", str(row["id"]))
    return float(found.group(1)) if found else 0.0


def _by_age(source: str, gpu: str) -> str:
    """The generation of a stack that is not in the table: by the source's year, else by what its GPUs came with."""
    years = [int(year) for year in re.findall(r"\b(20[12]\d)\b", source)]
    years += [2000 + int(year) for year in re.findall(r"\b(2\d)[01]\d\.\d{4,5}\b", source)]
    years += [2000 + int(year) for year in re.findall(r"v(2\d)\.\d\d", source)]
    if not years:
        return CAME_WITH.get(by_name(gpu).family, ENGINE)
    year = max(years)
    return UNFUSED if year <= 2022 else FLASH if year == 2023 else ENGINE if year <= 2025 else LATEST


def _sequence_parallel(layout: Mapping[str, Any], generation: str) -> bool:
    """As stated; unstated with all kernels but those of 2022 and 2023, whose tensor parallelism was the first kind."""
    stated = layout.get("sp")
    return generation not in (UNFUSED, FLASH) if stated is None else bool(stated)


def _tp_overlap(layout: Mapping[str, Any], generation: str, stack: str) -> Literal["none", "backward", "all"]:
    """As stated; unstated all with Transformer Engine, that of backward with an older Megatron."""
    if layout.get("async_tp") is not None:
        return "all" if layout["async_tp"] else "none"
    if stack != "megatron":
        return "none"
    return "all" if generation in (ENGINE, LATEST) else "backward"


def _dropout(model: Mapping[str, Any], generation: str) -> bool:
    """As stated; unstated with the kernels of 2022, whose models had it."""
    stated = model.get("dropout")
    return generation == UNFUSED if stated is None else bool(stated)


def _selective(recompute: str) -> frozenset[str]:
    """The parts of a layer that a row's selective recompute does again; attention's core, if it names none."""
    found = [parts for word, parts in SELECTIVE if re.search(rf"\b{word}\b", recompute.lower())]
    return frozenset[str]().union(*found) if found else frozenset({"attention"})
