"""What a model weighs and what it computes: parameter shapes and counts, and FLOPs a token, from the run file's fields.

Pure arithmetic, so that a plan needs no torch; the shapes equal those of the modules in `transformer.py`, which a test
holds for every preset. The convention behind every FLOP and MFU figure of the project stands here, and only here.

**The FLOP convention.** One multiplication and one addition are two FLOPs. Counted are the matrix products: each
weight of a linear layer and of the output head once a token (the embedding is a lookup and costs nothing, a tied head
is still a product), and the two products of attention, queries x keys and probabilities x values. Attention is causal
and counted as computed, half of the square: seq_len / 2 keys a query. A document mask computes less, which is ignored,
so that the figure depends on the run file alone. Backward is twice forward. Norms, activations, rotary, softmax, loss,
optimizer, rows that pad the vocabulary, and everything that recompute does again are not counted. MFU is this figure x
tokens a second / the accelerator's dense peak in the format of the linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fivefold.config.run import Model
from fivefold.errors import UserError

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Counts:
    """Parameters by place. `total` = embedding + head + layers x layer + norms."""

    total: int
    """All of them; a tied head counts once, as the embedding."""
    active: int
    """Those that one token meets; all of a dense model."""
    embedding: int
    """Rows x width of the token embedding."""
    head: int
    """The output head's own; 0 if it is tied to the embedding."""
    layer: int
    """One transformer block, its norms included."""
    norms: int
    """The norms outside the blocks: the last one and, if there is one, the embedding's."""


def vocabulary(model: Model) -> int:
    """The vocabulary as a number. Raises UserError while it is still `auto`."""
    if model.vocab == "auto":
        raise UserError("model.vocab is auto: its size is the tokenizer's, so give the data, or --model.vocab N")
    return model.vocab


def query_key_value_rows(model: Model) -> int:
    """Rows of the fused query, key and value projection: (heads + 2 kv_heads) x head size."""
    return (model.heads + 2 * model.key_value_heads) * model.head_size


def layer_shapes(model: Model) -> Shapes:
    """Shapes of one block's parameters by their names inside the block, in the module's order."""
    attended = model.heads * model.head_size
    head_norms: Shapes = {"attention.q_norm.weight": (model.head_size,), "attention.k_norm.weight": (model.head_size,)}
    up, up_rows = ("gate_up", 2 * model.ffn) if model.activation == "swiglu" else ("up", model.ffn)
    return (
        _norm(model, "attention_norm")
        | _linear(model, "attention.qkv", query_key_value_rows(model), model.hidden)
        | (head_norms if model.qk_norm else {})
        | _linear(model, "attention.output", model.hidden, attended)
        | _norm(model, "ffn_norm")
        | _linear(model, f"ffn.{up}", up_rows, model.hidden)
        | _linear(model, "ffn.down", model.hidden, model.ffn)
    )


def parameter_shapes(model: Model) -> Shapes:
    """Shape of every parameter by its name, in the module's order; a tied head has none of its own."""
    block = layer_shapes(model)
    vocab = vocabulary(model)
    return (
        {"embedding.weight": (vocab, model.hidden)}
        | (_norm(model, "embedding_norm") if model.embedding_norm else {})
        | {f"layers.{i}.{name}": shape for i in range(model.layers) for name, shape in block.items()}
        | _norm(model, "norm")
        | ({} if model.tied else {"head.weight": (vocab, model.hidden)})
    )


def parameters(model: Model) -> Counts:
    """How many parameters the model has. Exact: the sum of the elements of `parameter_shapes`."""
    embedding = vocabulary(model) * model.hidden
    head = 0 if model.tied else embedding
    layer = _elements(layer_shapes(model))
    norms = _elements(_norm(model, "norm")) * (2 if model.embedding_norm else 1)
    total = embedding + head + model.layers * layer + norms
    return Counts(total=total, active=total, embedding=embedding, head=head, layer=layer, norms=norms)


def matmul_parameters(model: Model) -> int:
    """Weights that multiply every token: all linear layers and the output head, without the embedding's lookup."""
    linear = sum(prod(shape) for shape in layer_shapes(model).values() if len(shape) == 2)
    return model.layers * linear + vocabulary(model) * model.hidden


def attention_flops_per_token(model: Model, seq_len: int) -> int:
    """FLOPs a token of all layers' two attention products in forward, causal: seq_len / 2 keys a query."""
    return model.layers * 2 * seq_len * model.heads * model.head_size


def forward_flops_per_token(model: Model, seq_len: int) -> int:
    """FLOPs a token of one forward pass over sequences of `seq_len` tokens, by the convention at the file's head."""
    return 2 * matmul_parameters(model) + attention_flops_per_token(model, seq_len)


def train_flops_per_token(model: Model, seq_len: int) -> int:
    """FLOPs a token of forward and backward: 6 x the weights that multiply + attention. The figure that MFU divides."""
    return 3 * forward_flops_per_token(model, seq_len)


def _linear(model: Model, name: str, rows: int, columns: int) -> Shapes:
    weight: Shapes = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if model.bias else weight


def _norm(model: Model, name: str) -> Shapes:
    weight: Shapes = {f"{name}.weight": (model.hidden,)}
    return weight | {f"{name}.bias": (model.hidden,)} if model.bias and model.norm == "layernorm" else weight


def _elements(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())
