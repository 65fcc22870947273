"""A published run as a `Run` and a `Cluster`: the mapping of its fields, and the defaults of what it leaves unsaid.

No rule is checked: published layouts need not be ones that this project would train. Defaults: a micro-batch of 1,
no recompute, ZeRO 1, a vocabulary of 51,200 (GPT-2's, padded), the accelerator's own network, dp from the number of
GPUs, a feed-forward that is gated unless it is four times the width. Layers are shared out evenly; where the stages do
not divide them, the first and last stage (or the last) have one fewer if that comes out even. An interleaved schedule
without a number of chunks has one layer a chunk. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold.config.run import Run
from fivefold.hardware.catalogue import by_name
from fivefold.plan.cluster import Cluster

VOCABULARY = 51_200
"""Of a model whose own is not said."""


def run_of_row(row: Mapping[str, Any]) -> Run:
    """The run of a row of the schema."""
    layout, model = row["layout"], row["model"]
    tp, pp, cp, ep = (int(layout.get(axis) or 1) for axis in ("tp", "pp", "cp", "ep"))
    dp = int(layout.get("dp") or max(1, row["hardware"]["count"] // (tp * pp * cp)))
    micro = int(layout.get("micro_batch") or 1)
    schedule, chunks = _schedule(layout, int(model["layers"]), pp)
    zero = _zero(layout)
    shards = layout.get("zero_group") or layout.get("fsdp_group") or dp
    return Run.model_validate(
        {
            "name": "published",
            "steps": 1,
            "model": _model(model),
            "data": {"train": [], "seq_len": int(model["seq"])},
            "batch": {"global_size": int(layout.get("global_batch") or micro * dp), "micro_size": micro},
            "parallel": {
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "ep": ep,
                "dp": dp,
                "replicate": max(1, dp // max(1, min(int(shards), dp))),
                "zero": zero,
                "schedule": schedule,
                "chunks": chunks,
                "layers_per_stage": split(int(model["layers"]), pp * chunks),
            },
            "precision": _precision(str(layout.get("precision") or "bf16")),
            "recompute": _recompute(str(layout.get("recompute") or "none")),
        }
    )


def cluster_of_row(row: Mapping[str, Any]) -> Cluster:
    """The cluster of a row of the schema: the catalogue's accelerator, with the network that the row names."""
    hardware = row["hardware"]
    accelerator = by_name(str(hardware["gpu"]))
    per_node = int(hardware.get("per_node") or min(8, accelerator.domain))
    stated = network(str(hardware.get("inter") or ""), per_node)
    link = 0.0 if "pcie" in str(hardware.get("intra") or "").lower() else accelerator.link
    return Cluster(
        accelerator=accelerator,
        gpus=int(hardware["count"]),
        per_node=per_node,
        link=link,
        domain=accelerator.domain if link else 1,
        nic=accelerator.nic if stated is None else stated,
        price=None,
    )


def network(text: str, per_node: int) -> float | None:
    """Bytes a second of one GPU's network that a description names, one direction; None if it has no number.

    `400 Gb/s/GPU`, `4x OmniPath 100 Gb/s per node` (a sum over the node), `1600 Gb/s/node`, `3.2 Tb/s`.
    """
    found = re.search(r"(?:(\d+)\s*x\s*)?[^\d,;(]*?(\d+(?:\.\d+)?)\s*([TG])(b|B|bps|bit)", text)
    if found is None:
        return None
    count, number, unit, bits = found.groups()
    rate = float(number) * (1e12 if unit == "T" else 1e9) * (1.0 if bits == "B" else 1 / 8)
    if count is not None:
        return rate * int(count) / per_node
    a_node = "node" in text.lower() and "gpu" not in text.lower()
    return rate / per_node if a_node else rate


def split(layers: int, stages: int) -> list[int]:
    """Layers of each stage, as published layouts have them."""
    for fewer in (set[int](), {0, stages - 1}, {stages - 1}):
        even, left = divmod(layers + len(fewer), stages)
        if not left and even:
            return [even - (stage in fewer) for stage in range(stages)]
    whole, left = divmod(layers, stages)
    first = (stages - left) // 2
    return [whole + (first <= stage < first + left) for stage in range(stages)]


def _schedule(layout: Mapping[str, Any], layers: int, pp: int) -> tuple[str, int]:
    """The schedule's name, and the chunks of a rank."""
    if pp == 1:
        return "1f1b", 1
    text, chunks = str(layout.get("schedule") or "1f1b").lower(), layout.get("vpp")
    if text in ("zb-v", "dualpipe-v", "dualpipe", "v-half", "v-min"):
        return ("zb-v" if text.startswith(("zb", "v")) else "dualpipe-v"), 2
    if text == "zb-2p":
        return "zb-h2", 1
    if text in ("zb-1p", "zb-h1"):
        return "zb-h1", 1
    if isinstance(chunks, int):
        return ("interleaved", chunks) if chunks > 1 else ("1f1b", 1)
    if chunks is not None or "1f1b-i" in text or text.startswith("interleaved"):
        return "interleaved", -(-layers // pp)
    return "1f1b", 1


def _model(model: Mapping[str, Any]) -> dict[str, Any]:
    hidden, ffn, moe = int(model["hidden"]), int(model["ffn"]), model.get("moe") or {}
    act = model.get("act")
    gated = act in ("swiglu", "geglu", "silu") or (act is None and (ffn != 4 * hidden or bool(moe)))
    fields: dict[str, Any] = {
        "layers": int(model["layers"]),
        "hidden": hidden,
        "heads": int(model["heads"]),
        "kv_heads": int(model.get("kv_heads") or model["heads"]),
        "head_dim": int(moe.get("head_dim") or model.get("head_dim") or hidden // int(model["heads"])),
        "ffn": ffn,
        "vocab": int(model.get("vocab") or VOCABULARY),
        "context": int(model["seq"]),
        "norm": "rmsnorm" if gated else "layernorm",
        "activation": "swiglu" if gated else "gelu",
        "bias": bool(model.get("bias", not gated)),
        "tied": bool(model.get("tied", not gated)),
        "mtp": int(moe.get("mtp") or 0),
    }
    if moe:
        fields["moe"] = {
            "experts": int(moe["n_experts"]),
            "top_k": int(moe["topk"]),
            "ffn": int(moe["moe_ffn"]),
            "shared": int(moe.get("n_shared") or 0),
            "dense_layers": int(moe.get("first_dense") or 0),
        }
    if mla := moe.get("mla") or model.get("mla"):
        fields["mla"] = {
            "q_rank": mla.get("q_lora"),
            "kv_rank": mla["kv_lora"],
            "plain": mla["qk_nope"],
            "rotated": mla["qk_rope"],
            "value": mla["v"],
        }
    if window := re.search(r"(\d+)", str(moe.get("sliding_window") or model.get("sliding_window") or "")):
        alternates = "alt" in str(moe.get("sliding_window") or model.get("sliding_window"))
        fields["options"] = {"sliding_window": int(window.group(1)), "sliding_every": 2 if alternates else 1}
    return fields


def _zero(layout: Mapping[str, Any]) -> int:
    """The stage; the sentence about FSDP that does not reshard after forward means 2."""
    stated = layout.get("zero")
    if isinstance(stated, int):
        return stated
    return 1 if stated is None else 2


def _precision(text: str) -> dict[str, str]:
    words = text.lower()
    compute = "fp16" if words.startswith("fp16") else "bf16"
    linear = "auto"
    if "fp4" in words:
        linear = "fp4"
    elif "mxfp8" in words.split("/")[0] or "rowwise" in words or "block" in words:
        linear = "fp8-block"
    elif "fp8" in words:
        linear = "fp8-tensor"
    narrow = "pure" in words
    return {
        "compute": compute,
        "linear": linear,
        "master": "bf16" if narrow else "fp32",
        "reduce": "bf16" if narrow or "16-bit grad" in words else "fp32",
    }


def _recompute(text: str) -> dict[str, Any]:
    words = text.lower()
    if words.startswith("none") or words == "selective:none":
        return {"mode": "none"}
    if words.startswith("full"):
        return {"mode": "full"}
    if "layer" in words and "layernorm" not in words:
        return {"mode": "full", "every": 2}
    return {"mode": "selective"}
