"""BLOOM in Hugging Face's files: it keeps query, key and value of a head together too, so that no tensor changes."""

from __future__ import annotations

from fivefold.config.run import Model
from fivefold.model.hf import HFAdaptor
from fivefold.model.hf_entry import Entry, Shape, same
from fivefold.model.spec import parameter_shapes


def _entries(model: Model) -> list[Entry]:
    return [_entry(name, shape) for name, shape in parameter_shapes(model).items()]


def _entry(name: str, shape: Shape) -> Entry:
    *path, module, kind = name.split(".")
    if module == "head":
        return same(name, f"lm_head.{kind}", shape)
    prefix = f"transformer.h.{path[1]}" if path else "transformer"
    return same(name, f"{prefix}.{_NAMES[module]}.{kind}", shape)


_NAMES = {
    "embedding": "word_embeddings",
    "embedding_norm": "word_embeddings_layernorm",
    "attention_norm": "input_layernorm",
    "qkv": "self_attention.query_key_value",
    "output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
    "norm": "ln_f",
}

BLOOM = HFAdaptor(
    entries=_entries,
    embedding="transformer.word_embeddings.weight",
    head="lm_head.weight",
    body="transformer.",
)
"""BLOOM; the files on the hub were saved from its body."""
