"""What the readers and writers of config.json share: defaults, and the lists of what cannot be represented or said.

A reader collects everything before it refuses, so that a user sees all of it at once. Weights in 8-bit blocks are the
one kind of quantization that is known: `fp8_blocks` gives their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fivefold.errors import UserError

Config = dict[str, Any]

_ALWAYS_NEUTRAL = ("attention_dropout", "quantization_config", "auto_map", "layer_types", "architectures")

_REASONS = {
    "attention_dropout": "there is no dropout",
    "hidden_dropout": "there is no dropout",
    "quantization_config": "weights must be plain floating point, or fp8 (e4m3) with one scale a block",
    "auto_map": "the model brings its own code",
    "layer_types": "all layers attend to the whole sequence",
    "architectures": "only language models (...ForCausalLM) and their bodies (...Model)",
    "sliding_window": "attention sees the whole sequence",
    "use_sliding_window": "attention sees the whole sequence",
    "attention_bias": "this type's biases would be in attention only",
    "apply_residual_connection_post_layernorm": "the residual is taken before the norm",
    "router_jitter_noise": "the router's input has no noise",
    "shared_expert_intermediate_size": "a shared expert has no gate of its own",
}

_FP8 = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
}
"""What the words of an fp8 quantization_config may be, where they are given."""

_FP8_LISTS = ("modules_to_not_convert", "ignored_layers")
"""Which tensors are not fp8; a file's own types say it too."""


def missing(config: Config, keys: tuple[str, ...]) -> Iterator[str]:
    """What to say of each size that is absent or no size."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{key} is {value!r}, not a positive whole number"


def is_number(value: Any) -> bool:
    """Whether it is a number of JSON, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


KINDS: dict[str, Callable[[Any], bool]] = {
    "a number": is_number,
    "true or false": lambda value: isinstance(value, bool),
    "a list of whole numbers": lambda value: isinstance(value, list) and all(type(each) is int for each in value),
}


def wrong_kinds(values: Config, kinds: dict[str, str]) -> Iterator[str]:
    """What to say of each value that is not of its kind, of `KINDS`; by key."""
    for key, kind in kinds.items():
        if not KINDS[kind](values[key]):
            yield f"{key} is {values[key]!r}, not {kind}"


def not_neutral(config: Config, *more: str) -> Iterator[str]:
    """What to say of each key, those that every type has and `more`, that would change what is computed."""
    for key in (*_ALWAYS_NEUTRAL, *more):
        if not _neutral(key, config.get(key)):
            yield f"{key} {config[key]!r}: {_REASONS[key]}"


def not_one(config: Config, wanted: dict[str, tuple[Any, str]]) -> Iterator[str]:
    """What to say of each key that is given and not the one value that can be represented; by key: (value, reason)."""
    for key, (value, reason) in wanted.items():
        if config.get(key) is not None and config[key] != value:
            yield f"{key} {config[key]!r}: {reason}"


def refuse(kind: str, problems: list[str]) -> None:
    """Raise UserError with all problems, if there are any."""
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise UserError(f"this config.json ({kind}) describes a model that Fivefold cannot represent:{listed}")


def unsayable(kind: str, problems: dict[str, bool]) -> None:
    """Raise UserError with the problems that are true, if any is."""
    broken = [text for text, wrong in problems.items() if wrong]
    if broken:
        raise UserError(f"Hugging Face's {kind} format has no way to say: {'; '.join(broken)}")


def given(value: Any, default: Any) -> Any:
    """The value, or transformers' default where a file leaves it out."""
    return default if value is None else value


def first(config: Config, *keys: str) -> Any:
    """The value of the first of the keys that is given; None if none is."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def fp8_blocks(config: Config) -> tuple[int, int] | None:
    """(rows, columns) of a block of an fp8 weight, which have one scale together; None for another format or none.

    The format of DeepSeek-V3's release: beside each F8_E4M3 tensor stands `<its name>_scale_inv`, by which a block's
    numbers are multiplied.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or set(quantization) - {*_FP8, *_FP8_LISTS, "weight_block_size"}:
        return None
    if any(quantization.get(key, words[0]) not in (None, *words) for key, words in _FP8.items()):
        return None
    block = quantization.get("weight_block_size")
    if quantization.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        return None
    return (block[0], block[1]) if all(type(size) is int and size > 0 for size in block) else None


def _neutral(key: str, value: Any) -> bool:
    if key == "layer_types":
        return not value or (isinstance(value, list) and all(each == "full_attention" for each in value))
    if key == "architectures":
        names = value if isinstance(value, list) else [value]
        return not value or all(str(name).endswith(("ForCausalLM", "Model")) for name in names)
    if key == "quantization_config":
        return not value or fp8_blocks({key: value}) is not None
    return not value
