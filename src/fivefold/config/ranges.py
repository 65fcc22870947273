"""What a single value of the run file may be: sizes, fractions, names, lists.

A rule here is about one key. It is asked before the rules between keys, which leave a key alone whose own value is
impossible, so that none of them divides by a size of zero.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from math import isfinite

from fivefold import plugins
from fivefold.config.duration import parse_duration
from fivefold.config.rule import Rule, value_of
from fivefold.config.run import Run
from fivefold.errors import UserError

FAMILIES = ("bloom", "deepseek", "llama")
OPTIMIZERS = ("adamw",)
DECAYS = ("constant", "cosine", "linear", "wsd")
SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
LARGEST_SEED = 2**63 - 1


def _number_rule(key: str, wanted: str, legal: Callable[[float], bool]) -> Rule:
    """`legal` for a number; `auto` and null have other rules."""

    def broken(run: Run) -> bool:
        value = value_of(run, key)
        return isinstance(value, int | float) and not legal(value)

    return Rule(
        f"{key} is {wanted}", (key,), broken, lambda run: f"{key} = {value_of(run, key)!r}: it must be {wanted}"
    )


def at_least(low: int, *keys: str) -> tuple[Rule, ...]:
    """Each key is a finite number, `low` or more."""
    wanted = f"{low} or more" if low else "0 or more, and finite"
    return tuple(_number_rule(key, wanted, lambda value: isfinite(value) and value >= low) for key in keys)


def positive(*keys: str) -> tuple[Rule, ...]:
    """Each key is a finite number above 0."""
    return tuple(_number_rule(key, "above 0, and finite", lambda value: isfinite(value) and value > 0) for key in keys)


def known(key: str, kind: str, built_in: tuple[str, ...]) -> Rule:
    """The key names something that is built in, or registered under `fivefold.<kind>`."""

    def says(run: Run) -> str:
        name = value_of(run, key)
        return f"{key} = {name}: {plugins.say_known(kind, name, plugins.names(kind, built_in))}"

    def broken(run: Run) -> bool:
        name = value_of(run, key)
        return name not in built_in and name not in plugins.names(kind, built_in)

    return Rule(f"{key} is known", (key,), broken, says)


def _weights(run: Run) -> list[str]:
    """The training sources whose weight is no share of anything."""
    bad = [
        (i, source.weight)
        for i, source in enumerate(run.data.train)
        if not (isfinite(source.weight) and source.weight > 0)
    ]
    return [f"data.train.{index}.weight = {weight!r}" for index, weight in bad]


def _bad_names(run: Run) -> list[str]:
    return [repr(each.name) for each in run.data.validation if not SAFE_NAME.fullmatch(each.name)]


def _double_names(run: Run) -> list[str]:
    counts = Counter(each.name for each in run.data.validation)
    return [f"{name} ({count} times)" for name, count in counts.items() if count > 1]


def _checkpoint_fault(run: Run) -> str | None:
    """What is wrong with `checkpoint.every`, if anything is."""
    every = run.checkpoint.every
    if every == "never":
        return None
    if isinstance(every, str):
        try:
            parse_duration(every)
        except UserError as error:
            return f"checkpoint.every: {error}, or steps as a bare number; null for only at the end, never for none"
    elif every is not None and every < 1:
        return f"checkpoint.every = {every}: it must be 1 step or more; null for only at the end"
    return None


RANGES: tuple[Rule, ...] = (
    *at_least(1, "steps"),
    *positive("tokens"),
    Rule(
        "the name is a safe folder name",
        about=("name",),
        broken=lambda run: not SAFE_NAME.fullmatch(run.name),
        says=lambda run: (
            f"name = {run.name!r}: it becomes a folder, so use letters, digits, `.`, `_` and `-`, "
            "not starting with `.` or `-`, at most 100"
        ),
    ),
    _number_rule("seed", f"from 0 to {LARGEST_SEED}", lambda value: 0 <= value <= LARGEST_SEED),
    *at_least(1, "cluster.gpus", "cluster.gpus_per_node"),
    *positive("cluster.nic_gbit_s"),
    *at_least(0, "cluster.price_per_gpu_hour"),
    known("model.family", "families", FAMILIES),
    *at_least(1, "model.layers", "model.hidden", "model.heads", "model.kv_heads", "model.head_dim", "model.ffn"),
    *at_least(1, "model.vocab", "model.context"),
    *positive("model.norm_eps", "model.rope_theta", "model.init_std"),
    _number_rule("model.rope_scaling.factor", "1 or more, and finite", lambda value: isfinite(value) and value >= 1),
    *at_least(1, "model.rope_scaling.original_context"),
    *positive("model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"),
    *positive("model.rope_scaling.beta_fast", "model.rope_scaling.beta_slow", "model.rope_scaling.attention_factor"),
    *positive("model.rope_scaling.mscale", "model.rope_scaling.mscale_all_dim"),
    *at_least(1, *(f"model.moe.{size}" for size in ("experts", "top_k", "ffn", "groups", "top_groups"))),
    *at_least(0, "model.moe.shared", "model.moe.dense_layers"),
    *positive("model.moe.scale"),
    *at_least(1, *(f"model.mla.{size}" for size in ("q_rank", "kv_rank", "plain", "rotated", "value"))),
    *at_least(0, "model.mtp"),
    Rule(
        "there is something to train on",
        about=("data.train",),
        broken=lambda run: not run.data.train,
        says=lambda run: "data.train is empty; give at least one {path: FOLDER} that `fivefold data build` wrote",
    ),
    Rule(
        "weights of sources are positive",
        about=("data.train",),
        broken=_weights,
        says=lambda run: (
            f"{', '.join(_weights(run))}: a weight must be above 0, and finite; leave a source out to not use it"
        ),
    ),
    Rule(
        "validation names are safe",
        about=("data.validation",),
        broken=_bad_names,
        says=lambda run: (
            f"data.validation has the name {', '.join(_bad_names(run))}: it becomes the metric val_loss/NAME, so use "
            "letters, digits, `.`, `_` and `-`, not starting with `.` or `-`"
        ),
    ),
    Rule(
        "validation names are unique",
        about=("data.validation",),
        broken=_double_names,
        says=lambda run: f"data.validation has the name {', '.join(_double_names(run))}; each set needs its own",
    ),
    *at_least(1, "data.seq_len", "validate.every", "validate.tokens", "batch.global_size", "batch.micro_size"),
    *at_least(1, *(f"parallel.{degree}" for degree in ("tp", "pp", "cp", "ep", "dp", "replicate", "chunks"))),
    _number_rule(
        "parallel.schedule_memory",
        "1 or more, so that a microbatch can run, and finite",
        lambda value: isfinite(value) and value >= 1,
    ),
    Rule(
        "every stage has a layer",
        about=("parallel.layers_per_stage",),
        broken=lambda run: (
            isinstance(stages := run.parallel.layers_per_stage, list) and (not stages or min(stages) < 1)
        ),
        says=lambda run: (
            f"parallel.layers_per_stage = {run.parallel.layers_per_stage}: every stage needs 1 layer or more"
        ),
    ),
    *at_least(1, "recompute.every"),
    Rule(
        "offload names a thing once",
        about=("offload",),
        broken=lambda run: len(set(run.offload)) < len(run.offload),
        says=lambda run: (
            f"offload = [{', '.join(run.offload)}] names a thing twice; "
            f"use offload [{', '.join(dict.fromkeys(run.offload))}]"
        ),
    ),
    known("optim.name", "optimizers", OPTIMIZERS),
    *at_least(0, "optim.lr", "optim.weight_decay", "optim.final_lr_fraction"),
    Rule(
        "betas are decays",
        about=("optim.betas",),
        broken=lambda run: not all(0 <= beta < 1 for beta in run.optim.betas),
        says=lambda run: f"optim.betas = {list(run.optim.betas)}: both must be 0 or more and below 1",
    ),
    _number_rule(
        "optim.eps",
        "from 1e-37, below which it is 0 in fp32 and 0 / 0 an update, and finite",
        lambda value: isfinite(value) and value >= 1e-37,
    ),
    Rule(
        "the clipping norm is positive",
        about=("optim.clip",),
        broken=lambda run: run.optim.clip is not None and not run.optim.clip > 0,
        says=lambda run: f"optim.clip = {run.optim.clip!r}: it must be above 0; null (or .inf) turns clipping off",
    ),
    _number_rule("optim.warmup_fraction", "from 0 to 1", lambda value: 0 <= value <= 1),
    known("optim.decay", "decays", DECAYS),
    *at_least(1, "optim.decay_steps"),
    *at_least(0, "loss.mtp", "loss.balance_sequence", "loss.balance_global", "loss.router_z"),
    *at_least(0, "routing.bias_rate"),
    *positive("routing.capacity_factor"),
    Rule(
        "checkpoints come every so often",
        about=("checkpoint.every",),
        broken=_checkpoint_fault,
        says=lambda run: str(_checkpoint_fault(run)),
    ),
    *at_least(1, "checkpoint.keep", "log.every"),
)
"""What holds for a single value of a run."""
