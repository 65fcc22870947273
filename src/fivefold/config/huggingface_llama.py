"""config.json of the Llama-like types, dense or with experts: llama, mistral, qwen3, mixtral and qwen3_moe.

Their parts are fields of one family here, `llama`; what a file leaves out is the default of transformers' class of its
type, because those differ.
"""

from __future__ import annotations

from typing import Any

from fivefold.config.huggingface_checks import (
    Config,
    given,
    missing,
    not_neutral,
    not_one,
    refuse,
    unsayable,
    wrong_kinds,
)
from fivefold.config.huggingface_rope import hf_rope, rope_fields
from fivefold.config.run import Experts, Model

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def read_llama(config: Config) -> dict[str, Any]:
    """The model fields of a config.json of type llama. Raises UserError with all that cannot be represented."""
    biases = {key: given(config.get(key), False) for key in ("attention_bias", "mlp_bias")}
    problems = [
        *missing(config, _SIZES),
        *not_neutral(config, "sliding_window"),
        *wrong_kinds(biases, dict.fromkeys(biases, "true or false")),
    ]
    if biases["attention_bias"] != biases["mlp_bias"]:
        words = " with ".join(f"{key} {value}" for key, value in biases.items())
        problems.append(f"{words}: a block has biases or has none")
    return _fields(config, problems, context=2048) | {"bias": biases["attention_bias"]}


def read_mistral(config: Config) -> dict[str, Any]:
    """As `read_llama`, of type mistral."""
    window = config.get("sliding_window", 4096)  # transformers' default where the key is absent
    problems = [*missing(config, _SIZES), *not_neutral(config)]
    if window is not None:
        problems.append(f"sliding_window {window}: attention sees the whole sequence")
    return _fields({"num_key_value_heads": 8} | config, problems, context=131072)


def read_qwen3(config: Config) -> dict[str, Any]:
    """As `read_llama`, of type qwen3."""
    problems = [*missing(config, _SIZES), *not_neutral(config, "attention_bias", "use_sliding_window")]
    defaults = {"head_dim": 128, "num_key_value_heads": 32}
    return _fields(defaults | config, problems, context=32768) | {"qk_norm": True}


def read_mixtral(config: Config) -> dict[str, Any]:
    """As `read_llama`, of type mixtral: every layer has experts, whose gates are normalized."""
    config = {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5} | config
    problems = [
        *missing(config, (*_SIZES, "num_local_experts", "num_experts_per_tok")),
        *not_neutral(config, "sliding_window", "router_jitter_noise"),
    ]
    fields = _fields(config, problems, context=131072, theta=1e6)
    moe = {
        "experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn": config["intermediate_size"],
    }
    return fields | {"moe": moe}


def read_qwen3_moe(config: Config) -> dict[str, Any]:
    """As `read_llama`, of type qwen3_moe: the layers of mlp_only_layers, which must be the leading ones, are dense."""
    defaults = {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    experts = given(config.get("num_experts"), config.get("num_local_experts", 128))  # transformers 4 and 5
    config = defaults | config | {"num_experts": experts}
    problems = [
        *missing(config, (*_SIZES, "num_experts", "num_experts_per_tok", "moe_intermediate_size")),
        *not_neutral(config, "attention_bias", "use_sliding_window", "shared_expert_intermediate_size"),
        *not_one(config, {"decoder_sparse_step": (1, "every layer after the leading dense ones has experts")}),
    ]
    dense, normalize = given(config.get("mlp_only_layers"), []), given(config.get("norm_topk_prob"), False)
    kinds = {"mlp_only_layers": "a list of whole numbers", "norm_topk_prob": "true or false"}
    if wrong := list(wrong_kinds({"mlp_only_layers": dense, "norm_topk_prob": normalize}, kinds)):
        problems += wrong
    elif sorted(dense) != list(range(len(dense))):
        problems.append(f"mlp_only_layers {dense}: only the leading layers can be dense")
    elif dense and len(dense) == config.get("num_hidden_layers"):
        problems.append(f"mlp_only_layers {dense}: no layer has experts, which is a qwen3")
    fields = _fields(config, problems, context=32768)
    moe = {
        "experts": experts,
        "top_k": config["num_experts_per_tok"],
        "ffn": config["moe_intermediate_size"],
        "dense_layers": len(dense),
        "normalize": normalize,
    }
    return fields | {"qk_norm": True, "moe": moe}


def write_llama(model: Model) -> Config:
    """The architecture's part of a config.json: qwen3 or qwen3_moe with QK-norm, else llama or mixtral.

    Raises UserError with all that the format has no way to say.
    """
    kinds = ("qwen3", "Qwen3ForCausalLM") if model.qk_norm else ("llama", "LlamaForCausalLM")
    if model.moe is not None:
        kinds = ("qwen3_moe", "Qwen3MoeForCausalLM") if model.qk_norm else ("mixtral", "MixtralForCausalLM")
    kind, name = kinds
    unsayable(
        kind,
        {
            f"norm {model.norm}": model.norm != "rmsnorm",
            f"activation {model.activation}": model.activation != "swiglu",
            f"position {model.position}": model.position != "rope",
            "embedding_norm true": model.embedding_norm,
            "bias true together with qk_norm true": model.bias and model.qk_norm,
            "bias true together with experts": model.bias and model.moe is not None,
            f"hidden {model.hidden}, which is no multiple of heads {model.heads}": kind == "llama"
            and model.hidden % model.heads != 0,
            "latent attention (mla)": model.mla is not None,
            f"mtp {model.mtp}": model.mtp != 0,
            **({} if model.moe is None else _unsayable_experts(kind, model.moe)),
        },
    )
    return {
        "architectures": [name],
        "model_type": kind,
        "hidden_size": model.hidden,
        "intermediate_size": model.moe.ffn if model.moe and kind == "mixtral" else model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "attention_dropout": 0.0,
        **({} if kind == "mixtral" else {"attention_bias": model.bias}),
        **({"mlp_bias": model.bias} if kind == "llama" else {}),
        **({} if model.moe is None else _experts(kind, model.moe)),
        **hf_rope(model),
    }


def _unsayable_experts(kind: str, moe: Experts) -> dict[str, bool]:
    return {
        f"moe.scores {moe.scores}": moe.scores != "softmax",
        f"moe.scale {moe.scale}": moe.scale != 1,
        f"moe.groups {moe.groups}": moe.groups != 1,
        f"moe.shared {moe.shared}": moe.shared != 0,
        "moe.bias true": moe.bias,
        f"moe.dense_layers {moe.dense_layers}": kind == "mixtral" and moe.dense_layers != 0,
        "moe.normalize false": kind == "mixtral" and not moe.normalize,
    }


def _experts(kind: str, moe: Experts) -> Config:
    """Qwen3-MoE's count is called num_experts by transformers 4 and most serving engines, num_local_experts by 5."""
    config = {"num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k, "output_router_logits": False}
    if kind == "mixtral":
        return config | {"router_jitter_noise": 0.0, "sliding_window": None}
    return config | {
        "num_experts": moe.experts,
        "moe_intermediate_size": moe.ffn,
        "norm_topk_prob": moe.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(moe.dense_layers)),
        "use_sliding_window": False,
    }


def _fields(config: Config, problems: list[str], context: int, theta: float = 10000.0) -> dict[str, Any]:
    """Fields that all these types share; `context` and `theta` are the type's defaults."""
    context = given(config.get("max_position_embeddings"), context)
    rope = rope_fields(config, context, problems, theta)
    activation = given(config.get("hidden_act"), "silu")
    if activation not in ("silu", "swish"):
        problems.append(f"hidden_act {activation!r}: the gate is silu")
    refuse(config["model_type"], problems)
    heads = config["num_attention_heads"]
    return {
        "family": "llama",
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": given(config.get("num_key_value_heads"), heads),
        "head_dim": given(config.get("head_dim"), config["hidden_size"] // heads),
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "context": context,
        "norm": "rmsnorm",
        "norm_eps": given(config.get("rms_norm_eps"), 1e-6),
        "activation": "swiglu",
        "position": "rope",
        "tied": given(config.get("tie_word_embeddings"), False),
        "init_std": given(config.get("initializer_range"), 0.02),
        **rope,
    }
