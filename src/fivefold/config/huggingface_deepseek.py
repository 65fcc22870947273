"""config.json of type deepseek_v3, as released and as transformers writes it, to and from the family `deepseek`.

The norms of the short vectors have an epsilon of 1e-6 in transformers and in DeepSeek's own code whatever the file
says, and one field gives ours; so a file with another epsilon is refused.
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
from fivefold.config.huggingface_rope import hf_rope, latent_rope_fields
from fivefold.config.run import Model

_DEFAULTS = {
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,  # 1 in transformers, whose files hold no such layer
}
"""Transformers' where a key is absent; null means something of its own in q_lora_rank and n_shared_experts."""

_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings"),
)

_ONE_VALUE = {
    "scoring_func": ("sigmoid", "the scores are sigmoid"),
    "topk_method": ("noaux_tc", "experts are chosen with a bias, from the groups with the best two"),
    "moe_layer_freq": (1, "every layer after the leading dense ones has experts"),
    "rope_interleave": (True, "the rotated channels stand in pairs"),
    "rms_norm_eps": (1e-6, "the norms of latent attention have 1e-6 whatever this says"),
    "mlp_bias": (False, "there are no biases"),
}

OWN_CODE = ("configuration_deepseek.", "modeling_deepseek.")
"""The release's own code, of which transformers' class is the equal."""


def read_deepseek(config: Config) -> dict[str, Any]:
    """The model fields of a config.json of type deepseek_v3. Raises UserError with all that cannot be represented."""
    config = _without_own_code(_DEFAULTS | config)
    problems = [
        *missing(config, _SIZES),
        *not_neutral(config, "attention_bias", "sliding_window"),
        *not_one(config, _ONE_VALUE),
        *_wrong_counts(config),
        *wrong_kinds(config, {"routed_scaling_factor": "a number", "norm_topk_prob": "true or false"}),
    ]
    rope = latent_rope_fields(config, config["max_position_embeddings"], problems)
    activation = given(config.get("hidden_act"), "silu")
    if activation not in ("silu", "swish"):
        problems.append(f"hidden_act {activation!r}: the gate is silu")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        problems.append(f"num_key_value_heads {kv_heads} with num_attention_heads {heads}: each head has its own")
    refuse("deepseek_v3", problems)
    return {
        "family": "deepseek",
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "context": config["max_position_embeddings"],
        "norm": "rmsnorm",
        "norm_eps": config["rms_norm_eps"],
        "activation": "swiglu",
        "position": "rope",
        "tied": config["tie_word_embeddings"],
        "mtp": config["num_nextn_predict_layers"],
        "init_std": config["initializer_range"],
        "moe": _experts(config),
        "mla": {
            "q_rank": config["q_lora_rank"],
            "kv_rank": config["kv_lora_rank"],
            "plain": config["qk_nope_head_dim"],
            "rotated": config["qk_rope_head_dim"],
            "value": config["v_head_dim"],
        },
        **rope,
    }


def write_deepseek(model: Model) -> Config:
    """The architecture's part of a config.json. Raises UserError with all that the format has no way to say."""
    moe, mla = model.moe, model.mla
    unsayable(
        "deepseek_v3",
        {
            f"norm {model.norm}": model.norm != "rmsnorm",
            f"norm_eps {model.norm_eps}, which is 1e-06 in the norms of latent attention": model.norm_eps != 1e-6,
            f"activation {model.activation}": model.activation != "swiglu",
            f"position {model.position}": model.position != "rope",
            "embedding_norm true": model.embedding_norm,
            "qk_norm true": model.qk_norm,
            "bias true": model.bias,
            "mla null": mla is None,
            "moe null": moe is None,
            "moe.bias false (true with routing.bias_rate 0 is the same)": moe is not None and not moe.bias,
            "moe.scores softmax": moe is not None and moe.scores != "sigmoid",
            "moe.groups of one expert": moe is not None and moe.experts == moe.groups,
        },
    )
    assert moe is not None, "without experts the format cannot say it"
    assert mla is not None, "without latent attention the format cannot say it"
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_nextn_predict_layers": model.mtp,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.plain,
        "qk_rope_head_dim": mla.rotated,
        "v_head_dim": mla.value,
        "rope_interleave": True,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn,
        "n_shared_experts": moe.shared,
        "first_k_dense_replace": moe.dense_layers,
        "moe_layer_freq": 1,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "norm_topk_prob": moe.normalize,
        "routed_scaling_factor": moe.scale,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        **hf_rope(model),
    }


def _experts(config: Config) -> dict[str, Any]:
    return {
        "experts": config["n_routed_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn": config["moe_intermediate_size"],
        "shared": given(config["n_shared_experts"], 0),
        "dense_layers": config["first_k_dense_replace"],
        "scores": "sigmoid",
        "normalize": config["norm_topk_prob"],
        "scale": float(config["routed_scaling_factor"]),
        "groups": config["n_group"],
        "top_groups": config["topk_group"],
        "bias": True,
    }


def _without_own_code(config: Config) -> Config:
    """The file without an `auto_map` that names nothing but DeepSeek's own code."""
    code = config.get("auto_map")
    if isinstance(code, dict) and all(str(name).startswith(OWN_CODE) for name in code.values()):
        return {key: value for key, value in config.items() if key != "auto_map"}
    return config


def _wrong_counts(config: Config) -> list[str]:
    """What to say of the numbers that may be 0, or null, and are neither that nor whole."""
    may_be_null = ("q_lora_rank", "n_shared_experts")
    counts = {key: config[key] for key in (*may_be_null, "first_k_dense_replace", "num_nextn_predict_layers")}
    return [
        f"{key} is {value!r}, not a whole number"
        for key, value in counts.items()
        if not (value is None and key in may_be_null) and (type(value) is not int or value < 0)
    ]
