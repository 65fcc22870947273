"""The model types of Hugging Face that are built in: which function reads a config.json of each, and which writes it.

BLOOM's stand here, with the refusal of Qwen2; the Llama-like types and DeepSeek-V3 have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fivefold.config.huggingface_checks import Config, first, given, missing, not_neutral, refuse, unsayable
from fivefold.config.huggingface_deepseek import read_deepseek, write_deepseek
from fivefold.config.huggingface_llama import (
    read_llama,
    read_mistral,
    read_mixtral,
    read_qwen3,
    read_qwen3_moe,
    write_llama,
)
from fivefold.config.run import Model
from fivefold.errors import UserError


def _read_qwen2(config: Config) -> dict[str, Any]:
    raise UserError(
        "model_type qwen2 cannot be represented: it has biases on queries, keys and values but none elsewhere"
    )


def _read_bloom(config: Config) -> dict[str, Any]:
    hidden = first(config, "n_embed", "hidden_size")
    layers = first(config, "num_hidden_layers", "n_layer")
    heads = first(config, "num_attention_heads", "n_head")
    sizes = {"hidden_size": hidden, "n_layer": layers, "n_head": heads, "vocab_size": config.get("vocab_size")}
    problems = [
        *missing(sizes, tuple(sizes)),
        *not_neutral(config, "hidden_dropout", "apply_residual_connection_post_layernorm"),
    ]
    if hidden and config.get("n_inner") not in (None, 4 * hidden):
        problems.append(f"n_inner {config['n_inner']}: BLOOM's feed-forward is 4 x hidden = {4 * hidden} wide")
    refuse("bloom", problems)
    return {
        "family": "bloom",
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": 4 * hidden,
        "vocab": config["vocab_size"],
        "context": given(config.get("seq_length"), 2048),
        "norm": "layernorm",
        "norm_eps": given(config.get("layer_norm_epsilon"), 1e-5),
        "activation": "gelu",
        "bias": True,
        "position": "alibi",
        "embedding_norm": True,
        "tied": given(config.get("tie_word_embeddings"), True),
        "init_std": given(config.get("initializer_range"), 0.02),
    }


def _write_bloom(model: Model) -> Config:
    unsayable(
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


READERS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "llama": read_llama,
    "mistral": read_mistral,
    "mixtral": read_mixtral,
    "qwen3": read_qwen3,
    "qwen3_moe": read_qwen3_moe,
    "deepseek_v3": read_deepseek,
    "qwen2": _read_qwen2,
    "bloom": _read_bloom,
}
"""By model type: the model fields of a config.json."""

WRITERS: dict[str, Callable[[Model], Config]] = {
    "llama": write_llama,
    "deepseek": write_deepseek,
    "bloom": _write_bloom,
}
"""By family: the architecture's part of a config.json."""
