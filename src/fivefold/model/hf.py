"""Hugging Face in and out: which tensors of a safetensors file make up which parameter of ours, family by family.

Reading the files is in `hf_import.py`, writing them in `hf_export.py`; both know no architecture and follow an
`HFAdaptor`. A family of your own brings one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, cat

from fivefold.config.huggingface import TokenIds, hf_config
from fivefold.config.run import Model
from fivefold.model.spec import parameter_shapes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """One parameter of ours and the tensors of the file whose rows it interleaves.

    Ours is `groups` equal groups of rows, and in each group stand the next rows of every one of theirs. One of theirs
    alone is the tensor itself; gate and up alternate, a group a row of each; query, key and value stand together by
    key/value head. So a range of our rows needs a range of rows of each of theirs, and a rank reads no more.
    """

    ours: str
    theirs: dict[str, Shape]
    """Names in the file and their shapes, in the order in which they stand in a group."""
    groups: int

    @property
    def rows(self) -> int:
        """Rows of our whole tensor."""
        return sum(shape[0] for shape in self.theirs.values())

    def split(self, ours: Tensor) -> Sequence[Tensor]:
        """From our whole tensor to theirs."""
        shapes = self.theirs.values()
        columns = next(iter(shapes))[1:]
        parts = ours.reshape(self.groups, -1, *columns).split([shape[0] // self.groups for shape in shapes], dim=1)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def fuse(self, parts: Sequence[Tensor]) -> Tensor:
        """From theirs, or from those of their rows that belong to some of the groups, to ours."""
        if len(parts) == 1:
            return parts[0]
        per_group = [shape[0] // self.groups for shape in self.theirs.values()]
        grouped = [part.reshape(-1, rows, *part.shape[1:]) for part, rows in zip(parts, per_group, strict=True)]
        return cat(grouped, dim=1).flatten(0, 1)

    def fuse_rows(self, start: int, stop: int, read: Callable[[str, int, int], Tensor]) -> Tensor:
        """Rows `start` to `stop` of ours; `read(name, first, last)` gives a range of rows of one of theirs."""
        size = self.rows // self.groups
        first, last = start // size, -(-stop // size)
        per_group = {name: shape[0] // self.groups for name, shape in self.theirs.items()}
        whole_groups = self.fuse([read(name, first * rows, last * rows) for name, rows in per_group.items()])
        return whole_groups[start - first * size : stop - first * size]


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


def same(ours: str, theirs: str, shape: Shape) -> Entry:
    """A parameter that the file holds as it is."""
    return Entry(ours, {theirs: shape}, groups=shape[0])


def _llama_entries(model: Model) -> list[Entry]:
    return [_llama_entry(name, shape, model) for name, shape in parameter_shapes(model).items()]


def _llama_entry(name: str, shape: Shape, model: Model) -> Entry:
    *path, module, kind = name.split(".")
    prefix = "model." + ".".join(path[:2]) if path else "model"
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
    return same(name, f"{prefix}.{_LLAMA_NAMES[module]}.{kind}", shape)


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
        return same(name, f"lm_head.{kind}", shape)
    prefix = f"transformer.h.{path[1]}" if path else "transformer"
    return same(name, f"{prefix}.{_BLOOM_NAMES[module]}.{kind}", shape)


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
