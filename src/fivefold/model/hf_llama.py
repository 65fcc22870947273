"""The Llama-like types in Hugging Face's files: Llama, Mistral and Qwen3, and Mixtral and Qwen3-MoE with experts."""

from __future__ import annotations

from fivefold.config.run import Model
from fivefold.model.hf import HFAdaptor
from fivefold.model.hf_entry import AnyEntry, Entry, Shape, same
from fivefold.model.hf_experts import FUSED, MIXTRAL, QWEN, fused, one_by_one
from fivefold.model.spec import EXPERTS, parameter_shapes


def _entries(model: Model) -> list[AnyEntry]:
    return [_entry(name, shape, model) for name, shape in parameter_shapes(model).items()]


def _fused_entries(model: Model) -> list[AnyEntry]:
    """With all experts of a layer in one tensor; in transformers' memory even Mixtral's mixture is called mlp."""
    return [_fused_entry(name, shape, model) for name, shape in parameter_shapes(model).items()]


def _entry(name: str, shape: Shape, model: Model) -> AnyEntry:
    names = QWEN if model.qk_norm else MIXTRAL
    if EXPERTS in name:
        return one_by_one(names, name, layer_of(name), shape)
    if name.endswith("router.weight"):
        return same(name, f"{layer_of(name)}.{names.mixture}.gate.weight", shape)
    return dense_entry(name, shape, model)


def _fused_entry(name: str, shape: Shape, model: Model) -> AnyEntry:
    if EXPERTS in name:
        return fused(name, layer_of(name), shape)
    if name.endswith("router.weight"):
        return same(name, f"{layer_of(name)}.{FUSED}.gate.weight", shape)
    return dense_entry(name, shape, model)


def layer_of(name: str) -> str:
    """The file's name of the layer in which a parameter `layers.N.more` stands; of one in no layer, the body's."""
    first, *rest = name.split(".")
    return f"model.layers.{rest[0]}" if first == "layers" else "model"


def dense_entry(name: str, shape: Shape, model: Model) -> Entry:
    """A parameter outside of the mixtures."""
    prefix = layer_of(name)
    *_, module, kind = name.split(".")
    columns = shape[1:]
    if module == "qkv":
        rows = {"q": model.heads, "k": model.key_value_heads, "v": model.key_value_heads}
        theirs = {
            f"{prefix}.self_attn.{part}_proj.{kind}": (heads * model.head_size, *columns)
            for part, heads in rows.items()
        }
        return Entry(name, theirs, groups=model.key_value_heads)
    if module == "gate_up":
        theirs = {f"{prefix}.mlp.{part}_proj.{kind}": (model.ffn, *columns) for part in ("gate", "up")}
        return Entry(name, theirs, groups=model.ffn)
    if module == "head":
        return same(name, f"lm_head.{kind}", shape)
    return same(name, f"{prefix}.{_NAMES[module]}.{kind}", shape)


_NAMES = {
    "embedding": "embed_tokens",
    "attention_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "down": "mlp.down_proj",
    "norm": "norm",
}

LLAMA = HFAdaptor(
    entries=_entries,
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    body="model.",
    ignored=r".*\.rotary_emb\.inv_freq",
    other_forms=(_fused_entries,),
)
"""Llama, Mistral and Mixtral without a sliding window; Qwen3 and Qwen3-MoE, which add the norms of queries and keys."""
