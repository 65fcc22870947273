"""Hugging Face in and out: which tensors of a safetensors file make up which parameter of ours, family by family.

Reading the files is in `hf_import.py`, writing them in `hf_export.py`; both know no architecture and follow an
`HFAdaptor`. A family of your own brings one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, cat, stack

from fivefold.config.huggingface import TokenIds, hf_config
from fivefold.config.run import Model
from fivefold.model.spec import parameter_shapes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One parameter of ours and the tensors of the file that it is made of."""

    ours: str
    theirs: dict[str, Shape]
    """Names in the file and their shapes, in the order of `split` and `fuse`."""
    split: Callable[[Tensor], Sequence[Tensor]]
    """From our whole tensor to theirs."""
    fuse: Callable[[Sequence[Tensor]], Tensor]
    """From theirs to our whole tensor."""


@dataclass(frozen=True)
class HFAdaptor:
    """What a family must say to be read from and written to Hugging Face's files."""

    entries: Callable[[Model], list[Entry]]
    """One entry a parameter, in the model's order; none for a tied head."""
    embedding: str
    """The file's name of the token embedding."""
    head: str
    """The file's name of the output head, which a tied model leaves out."""
    body: str = ""
    """Prefix of all names but the head's, which files saved from the body alone leave out."""
    ignored: str = r"(?!)"
    """A regular expression of names that some files hold and that are no weights, such as rotary frequencies."""
    config: Callable[[Model, TokenIds, str], dict[str, Any]] = hf_config
    """The config.json of a model; the string is the weights' dtype, such as "float32"."""


def whole(ours: str, theirs: str, shape: Shape) -> Entry:
    """A parameter that the file holds as it is."""
    return Entry(ours, {theirs: shape}, split=lambda tensor: (tensor,), fuse=lambda parts: parts[0])


def separate_heads(ours: str, theirs: Sequence[str], model: Model, columns: Shape) -> Entry:
    """Our fused query, key and value rows against three tensors; `columns` is (hidden,) for a weight, () for a bias.

    g kv heads  n query heads of one  h head size: ours (g (n + 2) h, ...) with each kv head's queries, key and value
    together, theirs (g n h, ...), (g h, ...), (g h, ...).
    """
    g, h = model.key_value_heads, model.head_size
    n = model.heads // g
    rows = (g * n * h, g * h, g * h)

    def split(fused: Tensor) -> Sequence[Tensor]:
        by_head = fused.view(g, n + 2, h, *columns)
        parts = (by_head[:, :n], by_head[:, n], by_head[:, n + 1])
        return [part.reshape(count, *columns) for part, count in zip(parts, rows, strict=True)]

    def fuse(parts: Sequence[Tensor]) -> Tensor:
        q, k, v = (part.view(g, -1, h, *columns) for part in parts)
        return cat([q, k, v], dim=1).view(-1, *columns)

    shapes = {name: (count, *columns) for name, count in zip(theirs, rows, strict=True)}
    return Entry(ours, shapes, split, fuse)


def interleaved(ours: str, theirs: Sequence[str], rows: int, columns: Shape) -> Entry:
    """Our rows that alternate between two projections of `rows` rows each against the two."""

    def split(fused: Tensor) -> Sequence[Tensor]:
        pairs = fused.view(rows, 2, *columns)
        return [pairs[:, 0].contiguous(), pairs[:, 1].contiguous()]

    def fuse(parts: Sequence[Tensor]) -> Tensor:
        return stack(list(parts), dim=1).view(2 * rows, *columns)

    return Entry(ours, dict.fromkeys(theirs, (rows, *columns)), split, fuse)


def _llama_entries(model: Model) -> list[Entry]:
    return [_llama_entry(name, shape, model) for name, shape in parameter_shapes(model).items()]


def _llama_entry(name: str, shape: Shape, model: Model) -> Entry:
    *path, module, kind = name.split(".")
    prefix = "model." + ".".join(path[:2]) if path else "model"
    if module == "qkv":
        theirs = [f"{prefix}.self_attn.{part}_proj.{kind}" for part in "qkv"]
        return separate_heads(name, theirs, model, columns=shape[1:])
    if module == "gate_up":
        theirs = [f"{prefix}.mlp.{part}_proj.{kind}" for part in ("gate", "up")]
        return interleaved(name, theirs, model.ffn, columns=shape[1:])
    if module == "head":
        return whole(name, f"lm_head.{kind}", shape)
    return whole(name, f"{prefix}.{_LLAMA_NAMES[module]}.{kind}", shape)


_LLAMA_NAMES = {
    "embedding": "embed_tokens",
    "attention_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "down": "mlp.down_proj",
    "norm": "norm",
}


def _bloom_entries(model: Model) -> list[Entry]:
    return [_bloom_entry(name, shape) for name, shape in parameter_shapes(model).items()]


def _bloom_entry(name: str, shape: Shape) -> Entry:
    """BLOOM keeps query, key and value of a head together too, so that no tensor changes."""
    *path, module, kind = name.split(".")
    if module == "head":
        return whole(name, f"lm_head.{kind}", shape)
    prefix = f"transformer.h.{path[1]}" if path else "transformer"
    return whole(name, f"{prefix}.{_BLOOM_NAMES[module]}.{kind}", shape)


_BLOOM_NAMES = {
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

LLAMA = HFAdaptor(
    entries=_llama_entries,
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    body="model.",
    ignored=r".*\.rotary_emb\.inv_freq",
)
"""Llama, Mistral without a sliding window, and Qwen3 (which adds the norms of queries and keys)."""

BLOOM = HFAdaptor(
    entries=_bloom_entries,
    embedding="transformer.word_embeddings.weight",
    head="lm_head.weight",
    body="transformer.",
)
"""BLOOM; the files on the hub were saved from its body."""
