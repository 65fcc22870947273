"""Rules on the architecture: heads and their sizes, latent attention, positions, and the length of a sequence."""

from __future__ import annotations

from fivefold.config.keys import default_of
from fivefold.config.rule import Rule, choices, divisors_of, multiples_around, value_of
from fivefold.config.run import RopeScaling, Run


def _say_heads(run: Run) -> str:
    model = run.model
    return (
        f"model.hidden = {model.hidden} is no multiple of model.heads = {model.heads}, so a head has no whole size; "
        f"use model.heads {choices(divisors_of(model.hidden))}, or model.hidden "
        f"{choices(multiples_around(model.hidden, model.heads))}, or give model.head_dim"
    )


def _odd_head(run: Run) -> bool:
    """False with latent attention, whose heads have sizes of their own."""
    known = run.model.head_dim != "auto" or run.model.hidden % run.model.heads == 0
    return run.model.mla is None and known and run.model.head_size % 2 == 1


def _scaling_fault(run: Run) -> str | None:
    """What is wrong between the settings of `model.rope_scaling`, if anything is."""
    scaling = run.model.rope_scaling
    if scaling is None:
        return None
    if scaling.type != "linear" and scaling.original_context is None:
        return f"type {scaling.type} needs original_context, the tokens of context before the stretch"
    if scaling.type == "llama3" and not scaling.low_freq_factor < scaling.high_freq_factor:
        return (
            f"low_freq_factor = {scaling.low_freq_factor} must be below high_freq_factor = {scaling.high_freq_factor}"
        )
    if scaling.type == "yarn" and not scaling.beta_slow < scaling.beta_fast:
        return f"beta_slow = {scaling.beta_slow} must be below beta_fast = {scaling.beta_fast}"
    if (scaling.mscale is None) != (scaling.mscale_all_dim is None):
        return f"mscale = {scaling.mscale} and mscale_all_dim = {scaling.mscale_all_dim} go together: give both or none"
    if scaling.mscale_all_dim is not None and (scaling.type != "yarn" or run.model.mla is None):
        return "mscale and mscale_all_dim belong to type yarn and latent attention (model.mla)"
    return None


def _key_width(run: Run) -> int:
    """Of a head of latent attention; 0 without it."""
    mla = run.model.mla
    return 0 if mla is None else mla.plain + mla.rotated


def _wide_values(run: Run) -> bool:
    return run.model.mla is not None and run.model.mla.value > _key_width(run)


def _say_length(run: Run) -> str:
    model, seq_len = run.model, run.data.seq_len
    beyond = (
        "ALiBi works beyond the length that a model was trained for"
        if model.position == "alibi"
        else f"a model that was trained on {model.context} tokens then also wants model.rope_scaling"
    )
    return (
        f"data.seq_len = {seq_len} is longer than model.context = {model.context}; use data.seq_len {model.context} "
        f"or less, or model.context {seq_len} ({beyond})"
    )


MODEL: tuple[Rule, ...] = (
    Rule(
        "weights are loaded from somewhere",
        about=("model.weights", "model.from"),
        broken=lambda run: run.model.weights == "load" and run.model.from_ is None,
        says=lambda run: "model.weights = load needs model.from, the Hugging Face directory or hub id to load from",
    ),
    Rule(
        "heads divide the hidden size",
        about=("model.hidden", "model.heads", "model.head_dim", "model.mla"),
        broken=lambda run: (
            run.model.mla is None and run.model.head_dim == "auto" and run.model.hidden % run.model.heads
        ),
        says=_say_heads,
    ),
    Rule(
        "key/value heads divide the heads",
        about=("model.heads", "model.kv_heads", "model.mla"),
        broken=lambda run: run.model.mla is None and run.model.heads % run.model.key_value_heads,
        says=lambda run: (
            f"model.kv_heads = {run.model.kv_heads} does not divide model.heads = {run.model.heads}; "
            f"use model.kv_heads {choices(divisors_of(run.model.heads))}"
        ),
    ),
    Rule(
        "rotary heads have an even size",
        about=("model.hidden", "model.heads", "model.head_dim", "model.position", "model.mla"),
        broken=lambda run: run.model.position == "rope" and _odd_head(run),
        says=lambda run: (
            f"a head is {run.model.head_size} wide (hidden {run.model.hidden}, heads {run.model.heads}), and rotary "
            f"positions turn pairs; use model.head_dim {choices(multiples_around(run.model.head_size, 2))}, "
            "or other model.heads"
        ),
    ),
    Rule(
        "latent attention has rotary positions",
        about=("model.mla", "model.position"),
        broken=lambda run: run.model.mla is not None and run.model.position != "rope",
        says=lambda run: (
            f"model.position = {run.model.position}, but a part of each head of model.mla turns with the position; "
            "use model.position rope"
        ),
    ),
    Rule(
        "latent attention turns pairs",
        about=("model.mla.rotated",),
        broken=lambda run: run.model.mla is not None and run.model.mla.rotated % 2,
        says=lambda run: (
            f"model.mla.rotated = {value_of(run, 'model.mla.rotated')}, and rotary positions turn pairs; use "
            f"model.mla.rotated {choices(multiples_around(value_of(run, 'model.mla.rotated'), 2))}"
        ),
    ),
    Rule(
        "values of latent attention fit beside keys",
        about=("model.mla.plain", "model.mla.rotated", "model.mla.value"),
        broken=_wide_values,
        says=lambda run: (
            f"model.mla.value = {value_of(run, 'model.mla.value')} is more than a key's width of plain + rotated = "
            f"{_key_width(run)}, to which attention's kernels fill values up; use model.mla.value {_key_width(run)} "
            "or less"
        ),
    ),
    Rule(
        "latent attention has no biases",
        about=("model.mla", "model.bias"),
        broken=lambda run: run.model.mla is not None and run.model.bias,
        says=lambda run: "model.bias = true, but the matrices of model.mla have no biases; use model.bias false",
    ),
    Rule(
        "latent attention norms its short vectors",
        about=("model.mla", "model.qk_norm"),
        broken=lambda run: run.model.mla is not None and run.model.qk_norm,
        says=lambda run: (
            "model.qk_norm = true, but model.mla norms the short vectors that queries and keys come from; "
            "use model.qk_norm false"
        ),
    ),
    Rule(
        "a sequence has the tokens that are predicted",
        about=("model.mtp", "data.seq_len"),
        broken=lambda run: run.model.mtp >= run.data.seq_len,
        says=lambda run: (
            f"model.mtp = {run.model.mtp} predicts as many tokens after the next, and more than data.seq_len = "
            f"{run.data.seq_len} leaves; use model.mtp {run.data.seq_len - 1}"
            f"{' or less' if run.data.seq_len > 1 else ''}, or data.seq_len {run.model.mtp + 1} or more"
        ),
    ),
    Rule(
        "the weight of multi-token prediction has some",
        about=("loss.mtp", "model.mtp"),
        broken=lambda run: run.model.mtp == 0 and run.loss.mtp not in (0, default_of("loss.mtp")),
        says=lambda run: (
            f"loss.mtp = {run.loss.mtp:g} weighs multi-token prediction, but model.mtp = 0: no further token is "
            "predicted; use model.mtp 1 or more, or loss.mtp 0"
        ),
    ),
    Rule(
        "rope scaling belongs to rotary positions",
        about=("model.position", "model.rope_scaling"),
        broken=lambda run: run.model.rope_scaling is not None and run.model.position != "rope",
        says=lambda run: (
            f"model.rope_scaling stretches rotary positions, but model.position = {run.model.position}; "
            "set model.rope_scaling to null"
        ),
    ),
    Rule(
        "rope scaling is whole",
        about=("model.rope_scaling", "model.mla", *(f"model.rope_scaling.{key}" for key in RopeScaling.model_fields)),
        broken=_scaling_fault,
        says=lambda run: f"model.rope_scaling: {_scaling_fault(run)}",
    ),
    Rule(
        "a sequence fits the model's context",
        about=("data.seq_len", "model.context"),
        broken=lambda run: run.data.seq_len > run.model.context,
        says=_say_length,
    ),
)
"""What holds between the sizes of a model."""
