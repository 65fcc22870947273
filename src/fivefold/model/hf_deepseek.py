"""DeepSeek-V3 in Hugging Face's files: latent attention, biased routers, and multi-token prediction as further layers.

Two things differ from ours. The rotated channels of a query or key stand there in pairs, here the first of all pairs
before the second of all, so rows are put in another order. And each depth of multi-token prediction repeats the
embedding and the head, which are one with the model's: they are compared and not kept, and written again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from functools import partial

from fivefold.config.run import LatentAttention, Model
from fivefold.model.hf import HFAdaptor
from fivefold.model.hf_entry import AnyEntry, Entry, Shape, same
from fivefold.model.hf_experts import QWEN, feed_forward, fused, one_by_one
from fivefold.model.spec import EXPERTS, parameter_shapes


def _entries(model: Model) -> list[AnyEntry]:
    return list(_all(model, partial(one_by_one, QWEN)))


def _fused_entries(model: Model) -> list[AnyEntry]:
    """With all experts of a layer in one tensor."""
    return list(_all(model, fused))


def _all(model: Model, experts: Callable[[str, str, Shape], AnyEntry]) -> Iterator[AnyEntry]:
    for name, shape in parameter_shapes(model).items():
        block, layer = _place(name, model)
        inside = name.removeprefix(f"{block}.")
        if EXPERTS in name:
            yield experts(name, layer, shape)
        elif inside.startswith("ffn."):
            yield _feed_forward(name, inside, layer, shape)
        elif inside.startswith("attention."):
            yield _attention(name, inside, layer, shape, model)
        else:
            yield Entry(name, {_other(inside, layer): shape}, groups=shape[0], copies=_copies(name, model))
        if inside == "ffn.router.weight":
            theirs = f"{layer}.mlp.gate.e_score_correction_bias"
            yield Entry(f"{block}.ffn.router.bias", {theirs: shape[:1]}, groups=shape[0], exact=True)


def _place(name: str, model: Model) -> tuple[str, str]:
    """Our prefix of the block or depth that a parameter stands in, and the file's prefix of it."""
    first, *rest = name.split(".")
    if first == "layers":
        return f"layers.{rest[0]}", f"model.layers.{rest[0]}"
    if first == "mtp":
        layer = f"model.layers.{model.layers + int(rest[0])}"
        return (f"mtp.{rest[0]}.block" if rest[1] == "block" else f"mtp.{rest[0]}"), layer
    return "", "model"


def _feed_forward(name: str, inside: str, layer: str, shape: Shape) -> Entry:
    if inside == "ffn.router.weight":
        return same(name, f"{layer}.mlp.gate.weight", shape)
    module = "mlp.shared_experts" if inside.startswith("ffn.shared.") else "mlp"
    return feed_forward(name, f"{layer}.{module}", QWEN.gate, QWEN.up, QWEN.down, shape)


def _attention(name: str, inside: str, layer: str, shape: Shape, model: Model) -> Entry:
    assert model.mla is not None, "the format has latent attention only"
    theirs = {f"{layer}.self_attn.{_ATTENTION[inside.split('.')[1]]}.weight": shape}
    if inside in ("attention.q.weight", "attention.q_b.weight"):
        return Entry(name, theirs, groups=model.heads, order=_order(model.mla.plain, model.mla))
    if inside == "attention.kv_a.weight":
        return Entry(name, theirs, groups=1, order=_order(model.mla.kv_rank, model.mla))
    return Entry(name, theirs, groups=shape[0])


def _order(before: int, mla: LatentAttention) -> list[int]:
    """Which of their rows each of ours is, where `before` rows that do not turn stand before the rotated ones."""
    pairs = range(before, before + mla.rotated, 2)
    return [*range(before), *pairs, *(row + 1 for row in pairs)]


def _other(inside: str, layer: str) -> str:
    if inside == "head.weight":
        return "lm_head.weight"
    in_a_depth = {"norm.weight": "shared_head.norm.weight"} if layer != "model" else {}
    return f"{layer}.{({**_OTHERS, **in_a_depth})[inside]}"


def _copies(name: str, model: Model) -> list[str]:
    """Where each depth of multi-token prediction repeats the embedding or the head; a tied one is both."""
    copied = ["embed_tokens"] if name == "embedding.weight" else []
    copied += ["shared_head.head"] if name == ("embedding.weight" if model.tied else "head.weight") else []
    return [f"model.layers.{model.layers + depth}.{module}.weight" for depth in range(model.mtp) for module in copied]


def _left_out(model: Model, names: Collection[str]) -> set[str]:
    """The depths of multi-token prediction beyond the model's; that a layer is one, its own norm tells."""
    depths = {layer for name in names if (layer := _layer(name)) is not None and name.endswith(".enorm.weight")}
    beyond = {layer for layer in depths if layer >= model.layers + model.mtp}
    return {name for name in names if _layer(name) in beyond}


def _layer(name: str) -> int | None:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return int(found[1]) if found else None


_ATTENTION = {
    "q": "q_proj",
    "q_a": "q_a_proj",
    "q_a_norm": "q_a_layernorm",
    "q_b": "q_b_proj",
    "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "kv_b": "kv_b_proj",
    "output": "o_proj",
}

_OTHERS = {
    "embedding.weight": "embed_tokens.weight",
    "norm.weight": "norm.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "project.weight": "eh_proj.weight",
}

DEEPSEEK = HFAdaptor(
    entries=_entries,
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    body="model.",
    ignored=r".*\.rotary_emb\.inv_freq",
    other_forms=(_fused_entries,),
    left_out=_left_out,
)
"""DeepSeek-V3, of whose files transformers reads all but multi-token prediction when it makes a model."""
