"""A model as a list of operations: what one rank computes and moves for one microbatch, layer by layer.

Each operation says its FLOPs by the convention of `model/spec.py` (their sums are equal, which a test holds), the bytes
that a simple kernel moves, and, if it is a matrix product, its shape; each communication what, how much and along which
axis of the mesh. What any of it takes is for `step.py`. Imports no torch.

m tokens of a product  n rows of the weight  k columns  t tokens between products (m / tp with sequence parallelism)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from fivefold.config.run import LatentAttention, Model, Run
from fivefold.model.reach import ranks_reached
from fivefold.model.spec import is_moe, vocabulary
from fivefold.plan.software import UNFUSED, Software

Kind = Literal["product", "attention", "pointwise", "gather"]
Axis = Literal["tp", "cp", "ep"]


class Shape(NamedTuple):
    """So many `products` of an (m, k) and a (k, n) matrix."""

    m: float
    n: float
    k: float
    products: float = 1.0


class Operation(NamedTuple):
    """One operation in forward; its backward follows from its kind."""

    name: str
    part: str
    """What selective recompute can name: norm, attention, rope, activation, ffn, residual, router, up_projection."""
    kind: Kind
    flops: float = 0.0
    """Of forward, by the project's convention; backward is twice that."""
    bytes: float = 0.0
    """Moved in forward beside a product's own operands."""
    shape: Shape | None = None
    linear: bool = True
    """Whether the product is a linear layer's, in the format of `precision.linear`."""
    saved: float = 0.0
    """Bytes that it keeps for backward, if nothing is recomputed: its inputs, and what attention keeps."""


class Communication(NamedTuple):
    """One collective of a layer in forward; backward has its mirror image."""

    name: str
    kind: Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]
    axis: Axis
    bytes: float
    """Of the whole tensor on one rank: what is gathered, or what is there to be reduced or sent."""
    backward: float = 1.0
    """Bytes in backward, over those."""


@dataclass(frozen=True)
class Work:
    """What a layer, or an end of the model, does for a microbatch."""

    operations: tuple[Operation, ...]
    communications: tuple[Communication, ...] = ()
    parameters: float = 0.0
    """On one rank, all that tp leaves of them, without experts."""
    experts: float = 0.0
    """On one rank, of routed experts."""

    @property
    def flops(self) -> float:
        """Of forward, by the project's convention."""
        return sum(operation.flops for operation in self.operations)


@dataclass(frozen=True)
class Sizes:
    """The sizes that a layer's work depends on: a run's, without the number of its replicas."""

    model: Model
    sequences: int
    seq_len: int
    tp: int
    cp: int
    ep: int
    width: int
    """Bytes of a number in the compute format."""
    sequence_parallel: bool
    dropout: bool
    unfused: bool
    """Whether attention writes its scores to memory."""
    hot: float = 1.0
    """Rows that the rank of ep gets, over the mean: those of the busiest one."""
    sent: float | None = None
    """Rows that are made of a token to send it: one for each rank of its experts, none with one rank. None where a row
    is made for each choice."""
    by_heads: bool = False
    """Whether the ranks of cp swap positions for heads (ulysses), instead of passing keys and values on."""

    @classmethod
    def of(cls, run: Run, software: Software) -> Sizes:
        """The sizes of a run."""
        return cls(
            run.model,
            run.batch.micro_size,
            run.data.seq_len,
            run.parallel.tp,
            run.parallel.cp,
            run.parallel.ep,
            {"fp64": 8, "fp32": 4}.get(run.precision.compute, 2),
            software.sequence_parallel or run.parallel.tp == 1,
            software.dropout,
            software.generation == UNFUSED,
            software.hot_experts,
            _sent(run) if software.ep_once == "rank" else None,
            run.parallel.cp_method == "ulysses",
        )

    @property
    def tokens(self) -> float:
        """Tokens of a product: those of all ranks of tp."""
        return self.sequences * self.seq_len / self.cp

    @property
    def between(self) -> float:
        """Tokens on one rank between products."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens

    def __hash__(self) -> int:
        return hash((id(self.model), self.sequences, self.seq_len, self.tp, self.cp, self.ep, self.sequence_parallel))


def _sent(run: Run) -> float:
    """Rows of a token that are sent, in a run whose tokens go once to a rank."""
    moe, ep = run.model.moe, run.parallel.ep
    return 0.0 if moe is None or ep == 1 else ranks_reached(moe, ep)


@lru_cache(maxsize=4096)
def layer_work(sizes: Sizes, layer: int) -> Work:
    """The work of layer number `layer`; equal layers give equal work."""
    attention = _grouped(sizes, layer) if sizes.model.mla is None else _latent(sizes, sizes.model.mla)
    ffn = _mixture(sizes) if is_moe(sizes.model, layer) else _dense(sizes, sizes.model.ffn, "ffn")
    return Work(
        (
            _pointwise(sizes, "attention_norm", "norm", 2, sizes.model.hidden),
            *attention.operations,
            _residual(sizes, "attention_residual"),
            _pointwise(sizes, "ffn_norm", "norm", 2, sizes.model.hidden),
            *ffn.operations,
            _residual(sizes, "ffn_residual"),
        ),
        (*attention.communications, *ffn.communications),
        attention.parameters + ffn.parameters + 2 * sizes.model.hidden,
        ffn.experts,
    )


@lru_cache(maxsize=1024)
def embedding_work(sizes: Sizes) -> Work:
    """A lookup, whose gradient is added into a whole table."""
    moved = 2 * sizes.between * sizes.model.hidden * sizes.width
    table = vocabulary(sizes.model) * sizes.model.hidden / sizes.tp
    communications = _over_tp(sizes, "embedding")[:1]
    return Work((Operation("embedding", "embedding", "gather", bytes=moved),), communications, table)


@lru_cache(maxsize=1024)
def head_work(sizes: Sizes) -> Work:
    """The last norm, the output head and the loss, which passes over the logits three times in fp32 halves."""
    model, vocab = sizes.model, vocabulary(sizes.model)
    head = _linear(sizes, "head", "head", sizes.tokens, vocab / sizes.tp, model.hidden)._replace(linear=False)
    logits = sizes.tokens * vocab / sizes.tp
    loss = Operation("loss", "loss", "pointwise", bytes=logits * (3 * sizes.width + 4), saved=logits * sizes.width)
    norm = _pointwise(sizes, "norm", "norm", 2, model.hidden)
    table = 0 if model.tied else vocab * model.hidden / sizes.tp
    return Work((norm, head, loss), _over_tp(sizes, "head")[:1], table + model.hidden)


@lru_cache(maxsize=1024)
def mtp_work(sizes: Sizes, depth: int) -> Work:
    """One depth of multi-token prediction: two norms, a projection, a block, a norm, the head and the loss."""
    model = sizes.model
    block, head = layer_work(sizes, model.layers + depth), head_work(sizes)
    project = _linear(sizes, "project", "project", sizes.between, model.hidden, 2 * model.hidden)
    norms = _pointwise(sizes, "mtp_norms", "norm", 4, model.hidden)
    return Work(
        (norms, project, *block.operations, *head.operations),
        (*block.communications, *head.communications),
        block.parameters + 2 * model.hidden**2 + 3 * model.hidden,
        block.experts,
    )


def stage_works(sizes: Sizes, layers: Sequence[int], first: bool, last: bool) -> list[tuple[Work, int]]:
    """The works of a stage, each with how often it comes: alike layers are told apart only where they differ."""
    counts: dict[int, int] = {}
    for layer in layers:
        kind = representative(sizes.model, layer)
        counts[kind] = counts.get(kind, 0) + 1
    works = [(embedding_work(sizes), 1)] if first else []
    works += [(layer_work(sizes, layer), count) for layer, count in counts.items()]
    if last:
        works += [(mtp_work(sizes, depth), 1) for depth in range(sizes.model.mtp)] + [(head_work(sizes), 1)]
    return works


def representative(model: Model, layer: int) -> int:
    """The number of a layer that does the same as layer number `layer`, the same for all of its kind."""
    every = int(model.options.get("sliding_every", 1))
    dense = model.moe.dense_layers if model.moe is not None else 0
    return layer % every if layer < dense or not dense else dense + (layer - dense) % every


def keys_a_query(model: Model, seq_len: int, layer: int) -> float:
    """Keys that a query meets on average: half of the sequence, or fewer with a sliding window."""
    window, every = model.options.get("sliding_window"), int(model.options.get("sliding_every", 1))
    if window is None or layer % every or window >= seq_len:
        return seq_len / 2
    return float(window - window * window / (2 * seq_len))


def _grouped(sizes: Sizes, layer: int) -> Work:
    model, tp = sizes.model, sizes.tp
    size, heads, kv = model.head_size, model.heads, model.key_value_heads
    rows = (heads + 2 * max(kv, tp)) * size / tp
    exact = (heads + 2 * kv) * size / tp
    qkv = _linear(sizes, "qkv", "qkv", sizes.tokens, rows, model.hidden)
    qkv = qkv._replace(flops=qkv.flops * exact / rows)
    rope = _pointwise(sizes, "rope", "rope", 2 * (model.position == "rope"), (heads + kv) * size / tp, sizes.tokens)
    operations = [qkv]
    operations += [rope] if model.position == "rope" and model.activation == "swiglu" else []
    operations += _core(sizes, keys_a_query(model, sizes.seq_len, layer), heads / tp, kv / tp, size, size)
    operations.append(_linear(sizes, "output", "output", sizes.tokens, model.hidden, heads * size / tp))
    parameters = (exact + heads * size / tp) * model.hidden
    over_cp = _over_cp(sizes, 2 * heads / tp * size, 2 * max(kv / tp, 1) * size)
    return Work(tuple(operations), (*_over_tp(sizes, "attention"), *over_cp), parameters)


def _latent(sizes: Sizes, mla: LatentAttention) -> Work:
    model, tp, tokens = sizes.model, sizes.tp, sizes.tokens
    heads, key = model.heads / tp, mla.plain + mla.rotated
    queries = (
        [_linear(sizes, "q", "up_projection", tokens, heads * key, model.hidden)]
        if mla.q_rank is None
        else [
            _linear(sizes, "q_a", "qkv", sizes.between, mla.q_rank, model.hidden),
            _pointwise(sizes, "q_norm", "norm", 2, mla.q_rank),
            _linear(sizes, "q_b", "up_projection", tokens, heads * key, mla.q_rank),
        ]
    )
    operations = [
        *queries,
        _linear(sizes, "kv_a", "qkv", sizes.between, mla.kv_rank + mla.rotated, model.hidden),
        _pointwise(sizes, "kv_norm", "norm", 2, mla.kv_rank),
        _linear(sizes, "kv_b", "up_projection", tokens, heads * (mla.plain + mla.value), mla.kv_rank),
        _pointwise(sizes, "rope", "rope", 2, heads * 2 * key, tokens),
        *_core(sizes, sizes.seq_len / 2, heads, heads, key, mla.value),
        _linear(sizes, "output", "output", tokens, model.hidden, heads * mla.value),
    ]
    parameters = model.hidden * (mla.kv_rank + mla.rotated + heads * mla.value)
    parameters += mla.kv_rank * heads * (mla.plain + mla.value)
    parameters += heads * key * (mla.q_rank or model.hidden) + (mla.q_rank or 0) * model.hidden
    over_cp = _over_cp(sizes, heads * (key + mla.value), heads * (key + mla.value))
    return Work(tuple(operations), (*_over_tp(sizes, "attention"), *over_cp), parameters)


def _core(sizes: Sizes, keys: float, heads: float, kv_heads: float, key: float, value: float) -> list[Operation]:
    """Attention's two products and the softmax between them, for the heads of one rank."""
    flops = 2 * sizes.tokens * keys * heads * (key + value)
    moved = sizes.tokens * (heads + kv_heads) * (key + value) * sizes.width
    kept = moved + sizes.tokens * heads * 4
    if not sizes.unfused:
        return [Operation("attention", "attention", "attention", flops, moved, saved=kept)]
    scores = sizes.tokens * sizes.seq_len * heads
    count = sizes.sequences * heads
    rows = sizes.tokens / sizes.sequences
    return [
        Operation("scores", "attention", "product", flops * key / (key + value), 0.0,
                  Shape(rows, sizes.seq_len, key, count), linear=False, saved=moved),
        Operation("softmax", "attention", "attention", 0.0, scores * (2 + 2 + 2 + (2 + 1 + 2) * sizes.dropout),
                  saved=scores * (sizes.width + 3 * sizes.dropout)),
        Operation("values", "attention", "product", flops * value / (key + value), 0.0,
                  Shape(rows, value, sizes.seq_len, count), linear=False),
    ]  # fmt: skip


def _dense(sizes: Sizes, ffn: float, part: str) -> Work:
    model, tp = sizes.model, sizes.tp
    gates = 2 if model.activation == "swiglu" else 1
    return Work(
        (
            _linear(sizes, f"{part}.up", "ffn", sizes.tokens, gates * ffn / tp, model.hidden),
            _pointwise(sizes, f"{part}.activation", "activation", gates + 1, ffn / tp, sizes.tokens),
            _linear(sizes, f"{part}.down", "ffn", sizes.tokens, model.hidden, ffn / tp),
        ),
        _over_tp(sizes, part),
        (gates + 1) * model.hidden * ffn / tp,
    )


def _mixture(sizes: Sizes) -> Work:
    """Router, sending, grouped products over the rank's experts, and the shared experts.

    A rank sends the mean of the rows, and the busiest one, for which the others wait, gets `hot` times that.
    FLOPs are those of the mean: the model does not grow with it.
    """
    model, moe, here = sizes.model, sizes.model.moe, sizes.tokens / sizes.tp
    assert moe is not None, "the layer has experts"
    chosen = here * moe.top_k
    got = chosen * sizes.hot
    local = moe.experts / sizes.ep
    up = Shape(got / local, 2 * moe.ffn, model.hidden, local)
    down = Shape(got / local, model.hidden, moe.ffn, local)
    row = model.hidden * sizes.width
    rows, arrived = chosen * row, got * row
    sent = rows if sizes.sent is None else here * sizes.sent * row
    sums = rows + arrived if sizes.sent is None else 2 * sent + here * row  # made there and read here
    operations = [
        _linear(sizes, "router", "router", here, moe.experts, model.hidden)._replace(linear=False),
        Operation("dispatch", "router", "gather", bytes=2 * sent + 2 * arrived, saved=rows),
        Operation("experts.up", "ffn", "product", _flops(up) / sizes.hot, 0.0, up, saved=arrived),
        Operation("experts.activation", "activation", "pointwise", bytes=3 * got * moe.ffn * sizes.width,
                  saved=2 * got * moe.ffn * sizes.width),
        Operation("experts.down", "ffn", "product", _flops(down) / sizes.hot, 0.0, down,
                  saved=got * moe.ffn * sizes.width),
        Operation("combine", "router", "gather", bytes=sums + arrived),
    ]  # fmt: skip
    communications = [
        Communication("dispatch", "all-to-all", "ep", arrived * (sizes.ep > 1)),
        Communication("combine", "all-to-all", "ep", arrived * (sizes.ep > 1)),
    ]
    experts = 3 * model.hidden * moe.ffn * local
    parameters = float(moe.experts * model.hidden)
    if moe.shared:
        shared = _dense(sizes, moe.ffn * moe.shared, "shared")
        operations += shared.operations
        communications += shared.communications
        parameters += shared.parameters
    return Work(tuple(operations), tuple(communications), parameters, experts)


def _linear(sizes: Sizes, name: str, part: str, m: float, n: float, k: float) -> Operation:
    shape = Shape(m, n, k)
    return Operation(name, part, "product", _flops(shape), 0.0, shape, saved=m * k * sizes.width)


def _flops(shape: Shape) -> float:
    return 2 * shape.m * shape.n * shape.k * shape.products


def _pointwise(
    sizes: Sizes, name: str, part: str, passes: float, columns: float, tokens: float | None = None
) -> Operation:
    """An operation that reads and writes so many tensors of tokens x columns."""
    elements = (sizes.between if tokens is None else tokens) * columns
    return Operation(name, part, "pointwise", bytes=passes * elements * sizes.width, saved=elements * sizes.width)


def _residual(sizes: Sizes, name: str) -> Operation:
    """The sum of the residual stream and an update, whose dropout has a mask of a byte a number."""
    elements = sizes.between * sizes.model.hidden
    return Operation(
        name,
        "residual",
        "pointwise",
        bytes=elements * (3 * sizes.width + sizes.dropout),
        saved=elements * sizes.dropout,
    )


def _over_tp(sizes: Sizes, name: str) -> tuple[Communication, ...]:
    """What column and row products exchange: a gather and a scatter of the tokens, or one sum."""
    if sizes.tp == 1:
        return ()
    moved = sizes.tokens * sizes.model.hidden * sizes.width
    if not sizes.sequence_parallel:
        return (Communication(f"{name}.sum", "all-reduce", "tp", moved),)
    return (
        Communication(f"{name}.gather", "all-gather", "tp", moved),
        Communication(f"{name}.scatter", "reduce-scatter", "tp", moved),
    )


def _over_cp(sizes: Sizes, queries: float, keys: float) -> tuple[Communication, ...]:
    """By the numbers of a token's query and output, and of its key and value, on one rank.

    Keys and values of the whole sequence pass each rank, in backward with their gradients. By heads all four are
    swapped for those of other positions; in backward the output, and the gradients of all four.
    """
    if sizes.cp == 1:
        return ()
    own = sizes.tokens * sizes.width
    if sizes.by_heads:
        back = (1.5 * queries + keys) / (queries + keys)
        return (Communication("heads", "all-to-all", "cp", own * (queries + keys), back),)
    return (Communication("keys", "all-gather", "cp", own * sizes.cp * keys, 2.0),)
