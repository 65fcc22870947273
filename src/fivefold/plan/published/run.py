"""A published run as a `Run` and a `Cluster`: the mapping of its fields, and the defaults of what it leaves unsaid.

No rule is checked: published layouts need not be ones that this project would train. Defaults: a micro-batch of 1,
no recompute, ZeRO 1, a vocabulary of 51,200 (GPT-2's, padded), the accelerator's own network, dp from the number of
GPUs, a feed-forward that is gated unless it is four times the width. A dp that fills the GPUs only together with ep
counts the replicas of an expert, as some sources do, and is taken times ep; a layout that fills them neither way is
refused. Layers are shared out evenly; where the stages do not divide them, the first and last stage (or the last) have
one fewer if that comes out even. An interleaved schedule without a number of chunks has one layer a chunk. Imports no
torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any

from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name
from fivefold.plan.cluster import Cluster

VOCABULARY = 51_200
"""Of a model whose own is not said."""
FASTEST = 1e13
"""Bytes a second that no GPU's network reaches."""


def run_of_row(row: Mapping[str, Any]) -> Run:
    """The run of a row whose fields are checked. Raises UserError if its layout contradicts itself."""
    layout, model = row["layout"], row["model"]
    tp, pp, cp, ep = (layout.get(axis) or 1 for axis in ("tp", "pp", "cp", "ep"))
    dp = replicas(layout, row["hardware"]["count"])
    _check_experts(dp * cp * tp, ep, (model.get("moe") or {}).get("n_experts"))
    micro = layout.get("micro_batch") or 1
    batch = layout.get("global_batch") or micro * dp
    if batch < micro * dp:
        raise UserError(f"micro_batch x dp = {micro:,} x {dp:,} = {micro * dp:,}, and global_batch = {batch:,}")
    schedule, chunks = _schedule(layout, model["layers"], pp)
    zero = _zero(layout)
    shards = min(layout.get("zero_group") or layout.get("fsdp_group") or dp, dp)
    if dp % shards:
        raise UserError(f"groups of {shards:,} share the optimizer state (zero_group), and dp = {dp:,} is no multiple")
    return Run.model_validate(
        {
            "name": "published",
            "steps": 1,
            "model": _model(model),
            "data": {"train": [], "seq_len": model["seq"]},
            "batch": {"global_size": batch, "micro_size": micro},
            "parallel": {
                "tp": tp,
                "pp": pp,
                "cp": cp,
                "ep": ep,
                "dp": dp,
                "replicate": dp // shards,
                "zero": zero,
                "schedule": schedule,
                "chunks": chunks,
                "layers_per_stage": split(model["layers"], pp * chunks),
            },
            "precision": _precision(layout.get("precision") or _usual(row["hardware"]["gpu"])),
            "recompute": _recompute(layout.get("recompute") or "none"),
        }
    )


def replicas(layout: Mapping[str, Any], gpus: int) -> int:
    """dp of a layout. Raises UserError if it does not fill its GPUs."""
    pp, tp, cp, ep = (layout.get(axis) or 1 for axis in ("pp", "tp", "cp", "ep"))
    one, stated = tp * pp * cp, layout.get("dp")
    if stated is None:
        if gpus % one:
            raise UserError(f"tp x pp x cp = {one:,}, and count = {gpus:,} is no multiple")
        return gpus // one
    for found in (stated, stated * ep):
        if one * found == gpus:
            return int(found)
    with_experts = "" if ep == 1 else f" (x ep = {one * stated * ep:,})"
    raise UserError(f"tp x pp x cp x dp = {one * stated:,}{with_experts}, and count = {gpus:,}")


def _check_experts(stage: int, ep: int, experts: int | None) -> None:
    """Raises UserError if the ranks of a stage cannot share out so many experts."""
    if ep == 1:
        return
    if experts is None:
        raise UserError(f"ep = {ep:,}, and the model has no experts")
    if experts % ep:
        raise UserError(f"ep = {ep:,} does not divide n_experts = {experts:,}")
    if stage % ep:
        raise UserError(f"ep = {ep:,} does not divide dp x cp x tp = {stage:,}, the ranks of a stage")


def cluster_of_row(row: Mapping[str, Any]) -> Cluster:
    """The cluster of a row whose fields are checked: the catalogue's accelerator, with the network that the row names.

    Raises UserError for an unknown accelerator, or a network that cannot be.
    """
    hardware = row["hardware"]
    accelerator = by_name(hardware["gpu"])
    per_node = hardware.get("per_node") or min(8, accelerator.domain)
    stated = network(hardware.get("inter") or "", per_node)
    if stated is not None and not 0 < stated < FASTEST:
        text = short_repr(hardware["inter"])
        raise UserError(
            f"hardware.inter is {text}, {stated:g} bytes/s a GPU, and should be above 0 and below {FASTEST:g}"
        )
    link = 0.0 if "pcie" in (hardware.get("intra") or "").lower() else accelerator.link
    return Cluster(
        accelerator=accelerator,
        gpus=hardware["count"],
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
    """The schedule's name, and the chunks of a rank. Raises UserError if the stages are more than the layers and what
    stands at both ends."""
    name, chunks = _named_schedule(layout, layers, pp)
    said = chunks if isinstance(layout.get("vpp"), int) or name != "interleaved" else 1
    if pp * said > layers + 2:
        times = "" if said == 1 else f" x {said:,} chunks"
        raise UserError(f"pp = {pp:,}{times} makes {pp * said:,} stages, and layers = {layers:,}")
    return name, chunks


def _named_schedule(layout: Mapping[str, Any], layers: int, pp: int) -> tuple[str, int]:
    if pp == 1:
        return "1f1b", 1
    text, chunks = (layout.get("schedule") or "1f1b").lower(), layout.get("vpp")
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
    hidden, ffn, moe = model["hidden"], model["ffn"], model.get("moe") or {}
    act = model.get("act")
    gated = act in ("swiglu", "geglu", "silu") or (act is None and (ffn != 4 * hidden or bool(moe)))
    fields: dict[str, Any] = {
        "layers": model["layers"],
        "hidden": hidden,
        "heads": model["heads"],
        "kv_heads": model.get("kv_heads") or model["heads"],
        "head_dim": moe.get("head_dim") or model.get("head_dim") or hidden // model["heads"],
        "ffn": ffn,
        "vocab": model.get("vocab") or VOCABULARY,
        "context": model["seq"],
        "norm": "rmsnorm" if gated else "layernorm",
        "activation": "swiglu" if gated else "gelu",
        "bias": not gated if model.get("bias") is None else model["bias"],
        "tied": not gated if model.get("tied") is None else model["tied"],
        "mtp": moe.get("mtp") or 0,
    }
    if moe:
        fields["moe"] = {
            "experts": moe["n_experts"],
            "top_k": moe["topk"],
            "ffn": moe["moe_ffn"],
            "shared": moe.get("n_shared") or 0,
            "dense_layers": moe.get("first_dense") or 0,
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


def _usual(gpu: str) -> str:
    """The format of products that a row does not name: bf16, or fp16 where there is none."""
    return "bf16" if "bf16" in by_name(gpu).peak else "fp16"


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
