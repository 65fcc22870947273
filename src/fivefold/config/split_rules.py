"""Rules on splitting: what tp cuts of every layer and what cp cuts of every sequence must come out whole.

tp gives each rank its attention heads, its columns of the dense feed-forward and of the shared experts, its rows of the
vocabulary and its share of a microbatch's tokens, and cuts no routed expert; cp gives each rank its part of a sequence.
The helpers answer for any numbers, so that a rule may use them to name the degrees that would fit.
"""

from __future__ import annotations

from math import gcd, lcm

from fivefold.config.rule import Rule, choices, divisors_of, multiples_around, value_of
from fivefold.config.run import Run

WIDTHS = ("model.moe.ffn", "model.moe.shared", "model.moe.dense_layers")
"""The keys of a mixture that what tp may be depends on."""


def splits_layers(run: Run, tp: int) -> bool:
    """Whether `tp` ranks can share the heads, the feed-forward and the vocabulary (if that is known)."""
    sizes = (*_head_counts(run), _dense_width(run), _shared_width(run))
    return all(size % tp == 0 for size in sizes) and (run.model.vocab == "auto" or _all_have_rows(run.model.vocab, tp))


def _head_counts(run: Run) -> tuple[int, ...]:
    """Query and key/value heads; with latent attention each head has its own of both."""
    model = run.model
    return (model.heads,) if model.mla else (model.heads, model.key_value_heads)


def _dense_width(run: Run) -> int:
    """Width of the dense layers' feed-forward; 0 if every layer has experts."""
    moe = run.model.moe
    return 0 if moe is not None and moe.dense_layers == 0 else run.model.ffn


def _shared_width(run: Run) -> int:
    """Width of the shared experts together; 0 if there are none."""
    moe = run.model.moe
    return 0 if moe is None else moe.ffn * moe.shared


def cuts_sequences(run: Run, cp: int) -> bool:
    """Whether `cp` ranks can share a sequence."""
    return run.data.seq_len % sequence_parts(run, cp) == 0


def sequence_parts(run: Run, cp: int) -> int:
    """Equal parts into which `cp` ranks cut a sequence. All but ulysses give each rank two, an early and a late one:

    under a causal mask late positions see more, so the two together are equal work (Megatron-LM's balance).
    """
    if cp == 1 or run.parallel.cp_method == "ulysses":
        return cp
    return 2 * cp


def fitting_lengths(run: Run) -> list[int]:
    """The sequence lengths nearest to the run's that cp and tp can cut, within the model's context if one is."""
    tp, cp, seq_len = run.parallel.tp, run.parallel.cp, run.data.seq_len
    unit = lcm(sequence_parts(run, cp), cp * tp // gcd(tp, run.batch.micro_size))
    lengths = multiples_around(seq_len, unit)
    return [length for length in lengths if length <= max(run.model.context, seq_len)] or lengths


def _all_have_rows(vocab: int, tp: int) -> bool:
    """Whether each of `tp` ranks gets a row when every rank but the last takes vocab / tp, rounded up."""
    return tp == 1 or (tp - 1) * -(-vocab // tp) < vocab


def _tp_choices(run: Run) -> str:
    fitting = [tp for tp in divisors_of(gcd(*_head_counts(run))) if splits_layers(run, tp)]
    return f"parallel.tp {choices(fitting)}"


def _micro_tokens(run: Run) -> int:
    """Tokens of a microbatch that one rank of cp has."""
    return run.batch.micro_size * (run.data.seq_len // run.parallel.cp)


def _uneven_tokens(run: Run) -> bool:
    """False while cp leaves no whole part: another rule says that."""
    return run.data.seq_len % run.parallel.cp == 0 and _micro_tokens(run) % run.parallel.tp != 0


def _say_tokens(run: Run) -> str:
    micro, tp, cp = run.batch.micro_size, run.parallel.tp, run.parallel.cp
    unit = tp // gcd(tp, run.data.seq_len // cp)
    replicas = run.parallel.dp if run.parallel.dp != "auto" else 1
    micros = [m for m in multiples_around(micro, unit) if run.batch.global_size % (m * replicas) == 0]
    other_micro = f", or batch.micro_size {choices(micros)}" if micros else ""
    return (
        f"a microbatch of batch.micro_size {micro} x data.seq_len {run.data.seq_len} / parallel.cp {cp} = "
        f"{_micro_tokens(run)} tokens cannot be split over parallel.tp = {tp}; "
        f"use data.seq_len {choices(fitting_lengths(run))}{other_micro}"
    )


def _ulysses_misfit(run: Run) -> bool:
    """False while tp does not divide the heads: other rules say that."""
    tp, cp, heads = run.parallel.tp, run.parallel.cp, _head_counts(run)
    whole = all(number % tp == 0 for number in heads)
    return run.parallel.cp_method == "ulysses" and whole and any(number // tp % cp for number in heads)


def _say_ulysses(run: Run) -> str:
    tp, cp, heads = run.parallel.tp, run.parallel.cp, _head_counts(run)
    fitting = [degree for degree in divisors_of(gcd(*heads) // tp) if cuts_sequences(run, degree)]
    kinds = (
        f"{heads[0] // tp} heads" if run.model.mla else f"{heads[0] // tp} query and {heads[1] // tp} key/value heads"
    )
    return (
        f"parallel.cp_method = ulysses shares out heads: {kinds} (of {' and '.join(map(str, heads))}, over parallel.tp "
        f"{tp}) cannot be split over parallel.cp = {cp}; "
        f"use parallel.cp {choices(fitting)}, or parallel.cp_method ring or gather"
    )


SPLITS: tuple[Rule, ...] = (
    Rule(
        "tp divides the heads",
        about=("model.heads", "model.kv_heads", "parallel.tp", *WIDTHS),
        broken=lambda run: run.model.heads % run.parallel.tp,
        says=lambda run: (
            f"model.heads = {run.model.heads} cannot be split over parallel.tp = {run.parallel.tp}; "
            f"use {_tp_choices(run)}"
        ),
    ),
    Rule(
        "tp divides the key/value heads",
        about=("model.heads", "model.kv_heads", "parallel.tp", *WIDTHS),
        broken=lambda run: run.model.mla is None and run.model.key_value_heads % run.parallel.tp,
        says=lambda run: (
            f"{run.model.key_value_heads} key/value heads (model.kv_heads = {run.model.kv_heads}) cannot be split over "
            f"parallel.tp = {run.parallel.tp}; use {_tp_choices(run)}"
        ),
    ),
    Rule(
        "tp divides the feed-forward width",
        about=("model.ffn", "model.heads", "model.kv_heads", "parallel.tp", *WIDTHS),
        broken=lambda run: _dense_width(run) % run.parallel.tp,
        says=lambda run: (
            f"model.ffn = {run.model.ffn} cannot be split over parallel.tp = {run.parallel.tp}; use model.ffn "
            f"{choices(multiples_around(run.model.ffn, run.parallel.tp))}, or {_tp_choices(run)}"
        ),
    ),
    Rule(
        "tp divides the width of the shared experts",
        about=("model.heads", "model.kv_heads", "parallel.tp", *WIDTHS),
        broken=lambda run: _shared_width(run) % run.parallel.tp,
        says=lambda run: (
            f"model.moe.ffn {value_of(run, 'model.moe.ffn')} x model.moe.shared {value_of(run, 'model.moe.shared')} = "
            f"{_shared_width(run)}, the width of the shared experts, cannot be split over parallel.tp = "
            f"{run.parallel.tp}; use model.moe.ffn "
            f"{choices(multiples_around(value_of(run, 'model.moe.ffn'), run.parallel.tp))}, or {_tp_choices(run)}"
        ),
    ),
    Rule(
        "each rank of tp has a part of the vocabulary",
        about=("model.vocab", "model.heads", "model.kv_heads", "parallel.tp", *WIDTHS),
        broken=lambda run: run.model.vocab != "auto" and not _all_have_rows(run.model.vocab, run.parallel.tp),
        says=lambda run: (
            f"model.vocab = {run.model.vocab} has no row for each of parallel.tp = {run.parallel.tp} ranks; "
            f"use model.vocab {multiples_around(int(run.model.vocab), run.parallel.tp)[-1]}, or {_tp_choices(run)}"
        ),
    ),
    Rule(
        "cp cuts a sequence into equal parts",
        about=("data.seq_len", "batch.micro_size", "parallel.cp", "parallel.cp_method", "parallel.tp"),
        broken=lambda run: not cuts_sequences(run, run.parallel.cp),
        says=lambda run: (
            f"data.seq_len = {run.data.seq_len} is no multiple of "
            f"{'' if run.parallel.cp_method == 'ulysses' else '2 x '}parallel.cp = "
            f"{sequence_parts(run, run.parallel.cp)}; use data.seq_len {choices(fitting_lengths(run))}"
        ),
    ),
    Rule(
        "tp shares the tokens of a microbatch",
        about=("batch.micro_size", "batch.global_size", "data.seq_len", "parallel.cp", "parallel.tp", "parallel.dp"),
        broken=_uneven_tokens,
        says=_say_tokens,
    ),
    Rule(
        "ulysses shares out the heads",
        about=("model.heads", "model.kv_heads", "data.seq_len", "parallel.tp", "parallel.cp", "parallel.cp_method"),
        broken=_ulysses_misfit,
        says=_say_ulysses,
    ),
)
"""What holds between a model, its sequences and the degrees that split them."""
