"""The model types of Hugging Face that are built in: what a config.json says in fields of ours, and the reverse.

A reader collects everything that Fivefold cannot represent before it refuses, and takes the defaults of transformers'
classes for keys that a file leaves out, because they differ between types (Mistral has a window unless told otherwise,
Qwen3's head size is 128, BLOOM is tied).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fivefold.config.huggingface_rope import hf_rope, rope_fields
from fivefold.config.run import Model
from fivefold.errors import UserError

Config = dict[str, Any]


def _read_llama(config: Config) -> dict[str, Any]:
    problems = [*_missing(config, _LLAMA_SIZES), *_not_neutral(config, "sliding_window")]
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if attention_bias != mlp_bias:
        problems.append(f"attention_bias {attention_bias} with mlp_bias {mlp_bias}: a block has biases or has none")
    return _llama_fields(config, problems, defaults=(2048, 1e-6)) | {"bias": attention_bias}


def _read_mistral(config: Config) -> dict[str, Any]:
    window = config.get("sliding_window", 4096)  # transformers' default where the key is absent
    problems = [*_missing(config, _LLAMA_SIZES), *_not_neutral(config)]
    if window is not None:
        problems.append(f"sliding_window {window}: attention sees the whole sequence")
    return _llama_fields({"num_key_value_heads": 8} | config, problems, defaults=(131072, 1e-6))


def _read_qwen3(config: Config) -> dict[str, Any]:
    problems = [*_missing(config, _LLAMA_SIZES), *_not_neutral(config, "attention_bias", "use_sliding_window")]
    defaults = {"head_dim": 128, "num_key_value_heads": 32}  # transformers' where the key is absent
    return _llama_fields(defaults | config, problems, defaults=(32768, 1e-6)) | {"qk_norm": True}


def _read_qwen2(config: Config) -> dict[str, Any]:
    raise UserError(
        "model_type qwen2 cannot be represented: it has biases on queries, keys and values but none elsewhere"
    )


def _read_bloom(config: Config) -> dict[str, Any]:
    hidden = _first(config, "n_embed", "hidden_size")
    layers = _first(config, "num_hidden_layers", "n_layer")
    heads = _first(config, "num_attention_heads", "n_head")
    sizes = {"hidden_size": hidden, "n_layer": layers, "n_head": heads, "vocab_size": config.get("vocab_size")}
    problems = [
        *_missing(sizes, tuple(sizes)),
        *_not_neutral(config, "hidden_dropout", "apply_residual_connection_post_layernorm"),
    ]
    if hidden and config.get("n_inner") not in (None, 4 * hidden):
        problems.append(f"n_inner {config['n_inner']}: BLOOM's feed-forward is 4 x hidden = {4 * hidden} wide")
    _refuse("bloom", problems)
    return {
        "family": "bloom",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": 4 * hidden,
        "vocab": config["vocab_size"],
        "context": _or(config.get("seq_length"), 2048),
        "norm": "layernorm",
        "norm_eps": _or(config.get("layer_norm_epsilon"), 1e-5),
        "activation": "gelu",
        "bias": True,
        "position": "alibi",
        "embedding_norm": True,
        "tied": _or(config.get("tie_word_embeddings"), True),
        "init_std": _or(config.get("initializer_range"), 0.02),
    }


def _llama_fields(config: Config, problems: list[str], defaults: tuple[int, float]) -> dict[str, Any]:
    """Fields that all Llama-like types share; `defaults` are the type's context and epsilon."""
    context = _or(config.get("max_position_embeddings"), defaults[0])
    rope = rope_fields(config, context, problems)
    activation = _or(config.get("hidden_act"), "silu")
    if activation not in ("silu", "swish"):
        problems.append(f"hidden_act {activation!r}: the gate is silu")
    _refuse(config["model_type"], problems)
    heads = config["num_attention_heads"]
    return {
        "family": "llama",
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": _or(config.get("num_key_value_heads"), heads),
        "head_dim": _or(config.get("head_dim"), config["hidden_size"] // heads),
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "context": context,
        "norm": "rmsnorm",
        "norm_eps": _or(config.get("rms_norm_eps"), defaults[1]),
        "activation": "swiglu",
        "position": "rope",
        "tied": _or(config.get("tie_word_embeddings"), False),
        "init_std": _or(config.get("initializer_range"), 0.02),
        **rope,
    }


READERS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen3": _read_qwen3,
    "qwen2": _read_qwen2,
    "bloom": _read_bloom,
}
"""By model type: the model fields of a config.json."""

_LLAMA_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

_ALWAYS_NEUTRAL = ("attention_dropout", "quantization_config", "auto_map", "layer_types", "architectures")

_REASONS = {
    "attention_dropout": "there is no dropout",
    "hidden_dropout": "there is no dropout",
    "quantization_config": "weights must be plain floating point",
    "auto_map": "the model brings its own code",
    "layer_types": "all layers attend to the whole sequence",
    "architectures": "only language models (...ForCausalLM) and their bodies (...Model)",
    "sliding_window": "attention sees the whole sequence",
    "use_sliding_window": "attention sees the whole sequence",
    "attention_bias": "Qwen3 with biases has them in attention only",
    "apply_residual_connection_post_layernorm": "the residual is taken before the norm",
}


def _neutral(key: str, value: Any) -> bool:
    if key == "layer_types":
        return not value or set(value) == {"full_attention"}
    if key == "architectures":
        return not value or all(str(name).endswith(("ForCausalLM", "Model")) for name in value)
    return not value


def _not_neutral(config: Config, *more: str) -> Iterator[str]:
    for key in (*_ALWAYS_NEUTRAL, *more):
        if not _neutral(key, config.get(key)):
            yield f"{key} {config[key]!r}: {_REASONS[key]}"


def _missing(config: Config, keys: tuple[str, ...]) -> Iterator[str]:
    for key in keys:
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"{key} is {value!r}, not a positive whole number"


def _refuse(kind: str, problems: list[str]) -> None:
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise UserError(f"this config.json ({kind}) describes a model that Fivefold cannot represent:{listed}")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _first(config: Config, *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _write_llama(model: Model) -> Config:
    kind, name = ("qwen3", "Qwen3ForCausalLM") if model.qk_norm else ("llama", "LlamaForCausalLM")
    _unsayable(
        kind,
        {
            f"norm {model.norm}": model.norm != "rmsnorm",
            f"activation {model.activation}": model.activation != "swiglu",
            f"position {model.position}": model.position != "rope",
            "embedding_norm true": model.embedding_norm,
            "bias true together with qk_norm true": model.bias and model.qk_norm,
            f"hidden {model.hidden}, which is no multiple of heads {model.heads}": kind == "llama"
            and model.hidden % model.heads != 0,
        },
    )
    biases = {} if model.qk_norm else {"mlp_bias": model.bias}
    return {
        "architectures": [name],
        "model_type": kind,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "attention_bias": model.bias,
        "attention_dropout": 0.0,
        **biases,
        **hf_rope(model),
    }


def _write_bloom(model: Model) -> Config:
    _unsayable(
        "bloom",
        {
            f"norm {model.norm}": model.norm != "layernorm",
            f"activation {model.activation}": model.activation != "gelu",
            f"position {model.position}": model.position != "alibi",
            "embedding_norm false": not model.embedding_norm,
            "bias false": not model.bias,
            "qk_norm true": model.qk_norm,
            f"kv_heads {model.kv_heads} with heads {model.heads}": model.key_value_heads != model.heads,
            f"head_dim {model.head_size}": model.head_size * model.heads != model.hidden,
            f"ffn {model.ffn}, which is not 4 x hidden = {4 * model.hidden}": model.ffn != 4 * model.hidden,
        },
    )
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "seq_length": model.context,
        "layer_norm_epsilon": model.norm_eps,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }


def _unsayable(kind: str, problems: dict[str, bool]) -> None:
    broken = [text for text, wrong in problems.items() if wrong]
    if broken:
        raise UserError(f"Hugging Face's {kind} format has no way to say: {'; '.join(broken)}")


WRITERS: dict[str, Callable[[Model], Config]] = {"llama": _write_llama, "bloom": _write_bloom}
"""By family: the architecture's part of a config.json."""
