"""What a model weighs and what it computes: parameter shapes and counts, and FLOPs a token, from the run file's fields.

Pure arithmetic, so that a plan needs no torch; the shapes equal those of the modules in `transformer.py`, which a test
holds for every preset. The convention behind every FLOP and MFU figure of the project stands here, and only here.

**The FLOP convention.** One multiplication and one addition are two FLOPs. Counted are the matrix products: each
weight of a linear layer and of the output head once a token (the embedding is a lookup and costs nothing, a tied head
is still a product), and the two products of attention, queries x keys and probabilities x values. Of a layer's experts
a token meets top_k and the shared ones, and the router whole; latent attention multiplies all its matrices, as in
training, and its heads are plain + rotated wide in the first product and value in the second. Each depth of multi-token
prediction counts as its block, its projection and the head once more. Attention is causal and counted as computed, half
of the square: seq_len / 2 keys a query. A document mask computes less, which is ignored, so that the figure depends on
the run file alone. Backward is twice forward. Norms, activations, rotary, softmax, loss, optimizer, the choice and the
sending of tokens, rows that pad the vocabulary, and everything that recompute does again are not counted. MFU is this
figure x tokens a second / the accelerator's dense peak in the format of the linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from fivefold.config.run import Experts, LatentAttention, Model
from fivefold.errors import UserError

Shapes = dict[str, tuple[int, ...]]

EXPERTS = "ffn.experts."
"""What the names of a layer's routed experts begin with, inside the layer; their first dimension is the experts."""


@dataclass(frozen=True)
class Counts:
    """Parameters by place. `total` = embedding + head + dense layers + mixture layers + mtp + norms.

    The bias and the load of each expert are no parameters: no gradient reaches them.
    """

    total: int
    """All of them; a tied head counts once, as the embedding."""
    active: int
    """Those that one token meets in training: all but the experts that it is not sent to."""
    embedding: int
    """Rows x width of the token embedding."""
    head: int
    """The output head's own; 0 if it is tied to the embedding."""
    dense_layer: int
    """One transformer block with a dense feed-forward, its norms included; 0 if the model has none."""
    moe_layer: int
    """One transformer block with a mixture of experts, all of them, its norms included; 0 if the model has none."""
    mtp: int
    """All depths of multi-token prediction, their blocks, norms and projections."""
    norms: int
    """The norms outside the blocks: the last one and, if there is one, the embedding's."""


def vocabulary(model: Model) -> int:
    """The vocabulary as a number. Raises UserError while it is still `auto`."""
    if model.vocab == "auto":
        raise UserError("model.vocab is auto: its size is the tokenizer's, so give the data, or --model.vocab N")
    return model.vocab


def is_moe(model: Model, layer: int) -> bool:
    """Whether layer number `layer` has experts; the block of depth k (from 0) is layer number model.layers + k."""
    return model.moe is not None and layer >= model.moe.dense_layers


def moe_layers(model: Model) -> tuple[int, ...]:
    """Numbers of the layers with experts, in order; those from model.layers on are multi-token prediction's blocks."""
    return tuple(layer for layer in range(model.layers + model.mtp) if is_moe(model, layer))


def query_key_value_rows(model: Model) -> int:
    """Rows of the fused query, key and value projection: (heads + 2 kv_heads) x head size. Not of latent attention."""
    return (model.heads + 2 * model.key_value_heads) * model.head_size


def layer_shapes(model: Model, layer: int) -> Shapes:
    """Shapes of the parameters of block number `layer` by their names inside the block, in the module's order."""
    return (
        _norm(model, "attention_norm")
        | (_grouped_queries(model) if model.mla is None else _latent_attention(model, model.mla))
        | _norm(model, "ffn_norm")
        | (_mixture(model, model.moe) if model.moe and is_moe(model, layer) else _feed_forward(model))
    )


def mtp_shapes(model: Model, depth: int) -> Shapes:
    """Shapes of what predicts the token of depth number `depth` (from 0), by names behind `mtp.DEPTH.`, in order."""
    block = layer_shapes(model, model.layers + depth)
    return (
        _norm(model, "embedding_norm")
        | _norm(model, "hidden_norm")
        | {"project.weight": (model.hidden, 2 * model.hidden)}
        | {f"block.{name}": shape for name, shape in block.items()}
        | _norm(model, "norm")
    )


def parameter_shapes(model: Model) -> Shapes:
    """Shape of every parameter by its name, in the module's order; a tied head has none of its own."""
    vocab = vocabulary(model)
    shapes: Shapes = {"embedding.weight": (vocab, model.hidden)}
    shapes |= _norm(model, "embedding_norm") if model.embedding_norm else {}
    for layer in range(model.layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(model, layer).items()}
    shapes |= _norm(model, "norm")
    shapes |= {} if model.tied else {"head.weight": (vocab, model.hidden)}
    for depth in range(model.mtp):
        shapes |= {f"mtp.{depth}.{name}": shape for name, shape in mtp_shapes(model, depth).items()}
    return shapes


def parameters(model: Model) -> Counts:
    """How many parameters the model has. Exact: the sum of the elements of `parameter_shapes`."""
    embedding = vocabulary(model) * model.hidden
    head = 0 if model.tied else embedding
    layers = [layer_shapes(model, layer) for layer in range(model.layers)]
    depths = [mtp_shapes(model, depth) for depth in range(model.mtp)]
    norms = _elements(_norm(model, "norm")) * (2 if model.embedding_norm else 1)
    ends = embedding + head + norms
    return Counts(
        total=ends + sum(map(_elements, [*layers, *depths])),
        active=ends + sum(sum(active_elements(model, shapes).values()) for shapes in [*layers, *depths]),
        embedding=embedding,
        head=head,
        dense_layer=0 if is_moe(model, 0) else _elements(layers[0]),
        moe_layer=_elements(layers[-1]) if is_moe(model, model.layers - 1) else 0,
        mtp=sum(map(_elements, depths)),
        norms=norms,
    )


def active_elements(model: Model, shapes: Shapes) -> dict[str, int]:
    """Elements of each parameter of a layer (or depth) that one token meets: top_k of the experts, all of the rest."""
    share = 1 if model.moe is None else model.moe.top_k
    return {name: share * prod(shape[1:]) if EXPERTS in name else prod(shape) for name, shape in shapes.items()}


def layer_matmul_parameters(model: Model, layer: int) -> int:
    """Weights of layer number `layer` that multiply a token."""
    return _multiplying(model, layer_shapes(model, layer))


def mtp_matmul_parameters(model: Model) -> int:
    """Weights of all depths of multi-token prediction that multiply a token, the head once a depth."""
    depths = (_multiplying(model, mtp_shapes(model, depth)) for depth in range(model.mtp))
    return sum(depths) + model.mtp * vocabulary(model) * model.hidden


def matmul_parameters(model: Model) -> int:
    """Weights that multiply a token: its linear layers and the output head, without the embedding's lookup.

    A weight that multiplies twice, the head of a model with multi-token prediction, is counted twice.
    """
    layers = sum(layer_matmul_parameters(model, layer) for layer in range(model.layers))
    return layers + vocabulary(model) * model.hidden + mtp_matmul_parameters(model)


def attention_flops_per_token(model: Model, seq_len: int) -> int:
    """FLOPs a token of all layers' two attention products in forward, causal: seq_len / 2 keys a query."""
    widths = 2 * model.head_size if model.mla is None else model.mla.plain + model.mla.rotated + model.mla.value
    return (model.layers + model.mtp) * seq_len * model.heads * widths


def forward_flops_per_token(model: Model, seq_len: int) -> int:
    """FLOPs a token of one forward pass over sequences of `seq_len` tokens, by the convention at the file's head."""
    return 2 * matmul_parameters(model) + attention_flops_per_token(model, seq_len)


def train_flops_per_token(model: Model, seq_len: int) -> int:
    """FLOPs a token of forward and backward: 6 x the weights that multiply + attention. The figure that MFU divides."""
    return 3 * forward_flops_per_token(model, seq_len)


def _grouped_queries(model: Model) -> Shapes:
    attended = model.heads * model.head_size
    head_norms: Shapes = {"attention.q_norm.weight": (model.head_size,), "attention.k_norm.weight": (model.head_size,)}
    return (
        _linear(model, "attention.qkv", query_key_value_rows(model), model.hidden)
        | (head_norms if model.qk_norm else {})
        | _linear(model, "attention.output", model.hidden, attended)
    )


def _latent_attention(model: Model, mla: LatentAttention) -> Shapes:
    query_rows = model.heads * (mla.plain + mla.rotated)
    queries: Shapes = (
        {"attention.q.weight": (query_rows, model.hidden)}
        if mla.q_rank is None
        else {
            "attention.q_a.weight": (mla.q_rank, model.hidden),
            "attention.q_a_norm.weight": (mla.q_rank,),
            "attention.q_b.weight": (query_rows, mla.q_rank),
        }
    )
    return queries | {
        "attention.kv_a.weight": (mla.kv_rank + mla.rotated, model.hidden),
        "attention.kv_a_norm.weight": (mla.kv_rank,),
        "attention.kv_b.weight": (model.heads * (mla.plain + mla.value), mla.kv_rank),
        "attention.output.weight": (model.hidden, model.heads * mla.value),
    }


def _feed_forward(model: Model) -> Shapes:
    up, up_rows = ("gate_up", 2 * model.ffn) if model.activation == "swiglu" else ("up", model.ffn)
    return _linear(model, f"ffn.{up}", up_rows, model.hidden) | _linear(model, "ffn.down", model.hidden, model.ffn)


def _mixture(model: Model, moe: Experts) -> Shapes:
    shared = moe.ffn * moe.shared
    routed: Shapes = {
        "ffn.router.weight": (moe.experts, model.hidden),
        f"{EXPERTS}gate_up": (moe.experts, 2 * moe.ffn, model.hidden),
        f"{EXPERTS}down": (moe.experts, model.hidden, moe.ffn),
    }
    every_token: Shapes = {
        "ffn.shared.gate_up.weight": (2 * shared, model.hidden),
        "ffn.shared.down.weight": (model.hidden, shared),
    }
    return routed | (every_token if shared else {})


def _linear(model: Model, name: str, rows: int, columns: int) -> Shapes:
    weight: Shapes = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if model.bias else weight


def _norm(model: Model, name: str) -> Shapes:
    weight: Shapes = {f"{name}.weight": (model.hidden,)}
    return weight | {f"{name}.bias": (model.hidden,)} if model.bias and model.norm == "layernorm" else weight


def _elements(shapes: Shapes) -> int:
    return sum(prod(shape) for shape in shapes.values())


def _multiplying(model: Model, shapes: Shapes) -> int:
    return sum(count for name, count in active_elements(model, shapes).items() if len(shapes[name]) > 1)
