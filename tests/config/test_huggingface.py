"""A config.json, in the style of transformers 4 or 5, becomes model fields, and back; what has no field is refused."""

import json
import math

import pytest
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

from fivefold.config.huggingface import (
    TokenIds,
    hf_config,
    model_fields,
    read_config,
    read_json,
    read_token_ids,
    token_ids,
    weights_directory,
)
from fivefold.config.huggingface_checks import fp8_blocks
from fivefold.config.run import Experts, LatentAttention, Model
from fivefold.errors import UserError
from tests.config.test_presets import preset

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1003,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
QWEN3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "use_sliding_window": False}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None}
BLOOM = {
    "model_type": "bloom",
    "vocab_size": 1003,
    "hidden_size": 96,
    "n_layer": 2,
    "n_head": 6,
    "layer_norm_epsilon": 1e-5,
}
MIXTRAL = MISTRAL | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 6}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "router_aux_loss_coef": 0.01,
}
YARN = {"factor": 40, "original_max_position_embeddings": 4096, "type": "yarn", "beta_fast": 32, "beta_slow": 1}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""As released."""
LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_FIELDS = {
    "type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_context": 64,
}


def model(config: dict) -> Model:
    return Model.model_validate(model_fields(config))


def test_a_llama_config_gives_every_field():
    assert model(LLAMA) == Model(
        family="llama",
        layers=2,
        hidden=96,
        heads=12,
        kv_heads=3,
        head_dim=16,
        ffn=160,
        vocab=1003,
        context=256,
        norm_eps=1e-5,
    )


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3"}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"type": "llama3", "rope_type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000}},
        {
            "rope_theta": 5e5,
            "rope_scaling": LLAMA3 | {"rope_type": "llama3"},
            "rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5},
        },
    ],
)
def test_rope_is_read_in_the_old_and_the_new_style(rope):
    fields = model_fields(LLAMA | rope)
    assert (fields["rope_theta"], fields["rope_scaling"]) == (5e5, LLAMA3_FIELDS)


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_scaling": None, "rope_theta": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 10000.0}},
    ],
)
def test_no_scaling_and_no_theta_are_the_defaults(rope):
    fields = model_fields(LLAMA | rope)
    assert (fields["rope_theta"], fields["rope_scaling"]) == (10000.0, None)


def test_yarn_takes_what_the_file_leaves_out_from_the_context():
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64, "beta_fast": None}
    scaling = model(LLAMA | {"rope_scaling": yarn}).rope_scaling
    assert scaling is not None
    assert (scaling.factor, scaling.original_context, scaling.beta_fast, scaling.beta_slow) == (4.0, 64, 32.0, 1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope type 'longrope'; known are"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'; known are"),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "rope type 'su'; known are"),
        ({"rope_scaling": {"factor": 2.0}}, "a factor (2.0) but no rope_type"),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            "rope_type 'linear' and type 'yarn'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope type 'linear' without factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "no numbers: factor '2'"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}},
            "with mrope_section [1, 2]",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "yarn with truncate false"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one table for all layers is wanted"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta is 10000.0 in config.json, 500000.0 in",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0},
            },
            "factor is 2.0 in rope_scaling and 4.0 in rope_parameters",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "the rope type is 'linear' in rope_scaling and 'default' in rope_parameters",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"attention_bias": True}, "attention_bias True with mlp_bias False"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1: there is no dropout"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quantization_config": FP8 | {"weight_block_size": [128, 0]}}, "quantization_config"),
        ({"quantization_config": FP8 | {"weight_block_size": None}}, "quantization_config"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "quantization_config"),
        ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "quantization_config"),
        ({"quantization_config": FP8 | {"quant_method": "fbgemm_fp8"}}, "quantization_config"),
        ({"quantization_config": FP8 | {"expert_dtype": "fp4"}}, "quantization_config"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window 4096"),
        ({"model_type": "mistral"}, "sliding_window 4096"),  # transformers' default where the key is absent
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window True"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias True"),
        ({"model_type": "qwen2"}, "biases on queries, keys and values but none elsewhere"),
        ({"model_type": "gemma3"}, "known are bloom, deepseek_v3, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe"),
        ({"model_type": None}, "names no model_type"),
    ],
)
def test_what_has_no_field_is_refused_by_name(change, said):
    with pytest.raises(UserError) as refused:
        model_fields(LLAMA | change)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise 0.1: the router's input has no noise"),
        ({"num_local_experts": 0}, "num_local_experts is 0, not a positive whole number"),
        ({"num_experts_per_tok": "2"}, "num_experts_per_tok is '2'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_a_mixtral_that_computes_something_else_is_refused(change, said):
    with pytest.raises(UserError) as refused:
        model_fields(MIXTRAL | change)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2: every layer after the leading dense ones has experts"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers [1]: only the leading layers can be dense"),
        ({"mlp_only_layers": [1, 0]}, "mlp_only_layers [1, 0]: no layer has experts, which is a qwen3"),
        ({"shared_expert_intermediate_size": 40}, "a shared expert has no gate of its own"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"num_experts": 0}, "num_experts is 0"),
    ],
)
def test_a_qwen3_moe_that_computes_something_else_is_refused(change, said):
    with pytest.raises(UserError) as refused:
        model_fields(QWEN3_MOE | change)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scoring_func": "softmax"}, "scoring_func 'softmax': the scores are sigmoid"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"rope_interleave": False}, "rope_interleave False: the rotated channels stand in pairs"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05: the norms of latent attention have 1e-6 whatever this says"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 with num_attention_heads 128: each head has its own"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"auto_map": {"AutoModel": "modeling_other.Model"}}, "auto_map"),
        ({"n_group": None}, "n_group is None, not a positive whole number"),
        ({"q_lora_rank": 1.5}, "q_lora_rank is 1.5, not a whole number"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1, not a whole number"),
        ({"first_k_dense_replace": True}, "first_k_dense_replace is True, not a whole number"),
        ({"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "yarn with mscale None and mscale_all_dim 1.0: give both"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "yarn with mscale 0.7 and mscale_all_dim None: give both"),
        ({"quantization_config": FP8 | {"fmt": "e5m2"}}, "quantization_config"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
    ],
)
def test_a_deepseek_that_computes_something_else_is_refused(change, said):
    with pytest.raises(UserError) as refused:
        model_fields(DEEPSEEK | change)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        (DEEPSEEK, {"routed_scaling_factor": None}, "routed_scaling_factor is None, not a number"),
        (DEEPSEEK, {"routed_scaling_factor": "2.5"}, "routed_scaling_factor is '2.5', not a number"),
        (DEEPSEEK, {"norm_topk_prob": "false"}, "norm_topk_prob is 'false', not true or false"),
        (QWEN3_MOE, {"norm_topk_prob": "false"}, "norm_topk_prob is 'false', not true or false"),
        (QWEN3_MOE, {"mlp_only_layers": 1}, "mlp_only_layers is 1, not a list of whole numbers"),
        (QWEN3_MOE, {"mlp_only_layers": [0, "1"]}, "mlp_only_layers is [0, '1'], not a list of whole numbers"),
        (LLAMA, {"attention_bias": "false", "mlp_bias": "false"}, "attention_bias is 'false', not true or false"),
        (LLAMA, {"layer_types": [["full_attention"]]}, "layer_types [['full_attention']]"),
        (LLAMA, {"architectures": 3}, "architectures 3"),
        (LLAMA, {"rope_theta": [1e4]}, "rope_theta is no number: [10000.0] in config.json"),
        (LLAMA, {"rope_theta": "big"}, "rope_theta is no number: 'big' in config.json"),
        (LLAMA, {"rope_scaling": {"type": ["yarn"]}}, "rope type \"['yarn']\""),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": True}}, "rope settings that are no numbers: factor True"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(config, change, said):
    with pytest.raises(UserError) as refused:
        model_fields(config | change)
    assert said in str(refused.value)


def test_everything_unsupported_is_listed_at_once():
    with pytest.raises(UserError) as refused:
        model_fields(LLAMA | {"hidden_act": "relu", "attention_dropout": 0.5, "rope_scaling": {"type": "ntk"}})
    assert all(word in str(refused.value) for word in ("hidden_act", "attention_dropout", "rope type 'ntk'"))


def test_a_mistral_without_a_window_is_a_llama():
    assert model(MISTRAL) == model(LLAMA)


def test_a_mixtral_has_experts_everywhere_and_its_own_default_theta():
    expected = model(LLAMA | {"rope_theta": 1e6}).model_copy(update={"moe": Experts(experts=6, top_k=2, ffn=160)})
    assert model(MIXTRAL) == expected
    assert model(MIXTRAL | {"head_dim": None}).head_size == 96 // 12


def test_a_qwen3_moe_has_leading_dense_layers_and_experts_under_the_name_of_either_transformers():
    moe = Experts(experts=6, top_k=3, ffn=40, dense_layers=1)
    assert model(QWEN3_MOE) == model(QWEN3).model_copy(update={"moe": moe})
    newer = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"} | {"num_local_experts": 6}
    assert model(newer) == model(QWEN3_MOE)
    without = {key: value for key, value in QWEN3_MOE.items() if key not in ("norm_topk_prob", "mlp_only_layers")}
    assert (model(without).moe.normalize, model(without).moe.dense_layers) == (False, 0)


def test_the_release_of_deepseek_v3_is_the_preset():
    """All but the standard deviation of new weights, which the report says otherwise than the file."""
    assert model(DEEPSEEK) == preset("deepseek-v3").model_copy(update={"init_std": 0.02})


@pytest.mark.parametrize(
    ("kind", "of_the_file", "changed"),
    [
        ("mixtral", MixtralConfig, {}),
        ("qwen3_moe", Qwen3MoeConfig, {}),
        ("deepseek_v3", DeepseekV3Config, {"num_nextn_predict_layers": 0}),
    ],
)
def test_what_a_file_leaves_out_is_what_transformers_takes(kind, of_the_file, changed):
    """All but DeepSeek's depths of multi-token prediction, of which transformers' files hold none."""
    sizes = {key: getattr(of_the_file(), key) for key in SIZES}
    written = of_the_file(**sizes).to_dict()
    assert model(sizes | {"model_type": kind}) == model(written | changed)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"q_lora_rank": None}, {"mla": {"q_rank": None}}),
        ({"n_shared_experts": None}, {"moe": {"shared": 0}}),
        ({"num_key_value_heads": None}, {}),
        ({"rope_scaling": None}, {"rope_scaling": None}),
        (
            {"rope_scaling": YARN | {"mscale": 1.0}},
            {"rope_scaling": {"mscale": None, "mscale_all_dim": None}},
        ),
        (
            {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "attention_factor": 1.1}},
            {"rope_scaling": {"mscale": 0.7, "mscale_all_dim": 0.5, "attention_factor": 1.1}},
        ),
        (
            {"rope_scaling": None, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "rope_theta": 1e4}},
            {"rope_scaling": {"mscale": 0.7, "mscale_all_dim": 0.5}},
        ),
    ],
)
def test_deepseeks_null_is_a_value_and_its_pair_of_mscales_stays_a_pair(change, fields):
    whole = model(DEEPSEEK).model_dump()
    for key, value in fields.items():
        whole[key] = whole[key] | value if isinstance(value, dict) else value
    assert model(DEEPSEEK | change) == Model.model_validate(whole)


def test_with_grouped_queries_the_pair_of_mscales_becomes_their_factor():
    scaling = model(LLAMA | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}).rope_scaling
    assert scaling.attention_factor == (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert scaling.mscale is scaling.mscale_all_dim is None


@pytest.mark.parametrize("more", [{}, {"scale_fmt": "ue8m0"}, {"modules_to_not_convert": ["lm_head"]}])
def test_weights_in_fp8_blocks_are_taken_for_any_type_and_their_size_is_read(more):
    assert model(LLAMA | {"quantization_config": FP8 | more}) == model(LLAMA)
    assert fp8_blocks({"quantization_config": FP8 | more | {"weight_block_size": [64, 128]}}) == (64, 128)


def test_qwen3_has_head_norms_and_its_own_default_head_size():
    without = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert (model(QWEN3).qk_norm, model(QWEN3).head_size, model(without).head_size) == (True, 16, 128)


@pytest.mark.parametrize(
    ("config", "default"),
    [(LLAMA, False), (MISTRAL, False), (QWEN3, False), (BLOOM, True)],
    ids=["llama", "mistral", "qwen3", "bloom"],
)
def test_whether_the_head_is_tied_follows_the_file_or_the_types_default(config, default):
    without = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    assert model(without).tied is default
    assert model(without | {"tie_word_embeddings": not default}).tied is not default


def test_a_bloom_config_is_read_with_the_names_of_any_age():
    old = {key: value for key, value in BLOOM.items() if key not in ("hidden_size", "n_layer", "n_head")}
    old |= {"n_embed": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "seq_length": 512, "n_inner": None}
    assert model(old) == model(BLOOM | {"seq_length": 512})
    assert (model(old).ffn, model(old).bias, model(old).context) == (384, True, 512)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_inner": 100}, "n_inner 100"),
        ({"hidden_dropout": 0.1}, "hidden_dropout 0.1"),
        ({"apply_residual_connection_post_layernorm": True}, "the residual is taken before the norm"),
        ({"n_head": None}, "n_head is None"),
    ],
)
def test_a_bloom_of_another_shape_is_refused(change, said):
    with pytest.raises(UserError) as refused:
        model_fields(BLOOM | change)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        LLAMA | {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        LLAMA
        | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16}},
        LLAMA | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.5}},
        QWEN3,
        BLOOM,
        MIXTRAL,
        MIXTRAL | {"tie_word_embeddings": True, "num_experts_per_tok": 3},
        QWEN3_MOE,
        QWEN3_MOE | {"norm_topk_prob": False, "mlp_only_layers": []},
        DEEPSEEK,
        DEEPSEEK | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5, "attention_factor": 1.1}},
        DEEPSEEK | {"q_lora_rank": None, "rope_scaling": None, "norm_topk_prob": False, "num_nextn_predict_layers": 0},
    ],
)
def test_fields_survive_the_way_out_and_back_in_either_style(config):
    fields = model(config)
    written = hf_config(fields, TokenIds(bos=1, eos=(2,), pad=None), "float32")
    old_style = {key: value for key, value in written.items() if key != "rope_parameters"}
    new_style = {key: value for key, value in written.items() if key not in ("rope_scaling", "rope_theta")}
    assert model(written) == model(old_style) == model(new_style) == fields
    assert json.loads(json.dumps(written)) == written


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm": "layernorm"}, "norm layernorm"),
        ({"position": "alibi"}, "position alibi"),
        ({"activation": "gelu"}, "activation gelu"),
        ({"embedding_norm": True}, "embedding_norm true"),
        ({"qk_norm": True, "bias": True}, "bias true together with qk_norm true"),
        ({"hidden": 100}, "hidden 100, which is no multiple of heads 12"),
        ({"family": "bloom"}, "norm rmsnorm; activation swiglu; position rope"),
        ({"family": "mine"}, "family 'mine' has no built-in config.json"),
    ],
)
def test_an_architecture_that_the_format_cannot_express_is_not_written(change, said):
    with pytest.raises(UserError) as refused:
        hf_config(model(LLAMA).model_copy(update=change), TokenIds(), "float32")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("config", "change", "said"),
    [
        (
            MIXTRAL,
            {"moe": {"shared": 1, "scale": 2.0}},
            "mixtral format has no way to say: moe.scale 2.0; moe.shared 1",
        ),
        (MIXTRAL, {"moe": {"dense_layers": 1, "normalize": False}}, "moe.dense_layers 1; moe.normalize false"),
        (MIXTRAL, {"moe": {"scores": "sigmoid", "bias": True}}, "moe.scores sigmoid; moe.bias true"),
        (MIXTRAL, {"moe": {"groups": 2}, "mtp": 1}, "mtp 1; moe.groups 2"),
        (MIXTRAL, {"bias": True}, "bias true together with experts"),
        (QWEN3_MOE, {"moe": {"shared": 1}}, "qwen3_moe format has no way to say: moe.shared 1"),
        (LLAMA, {"mla": LatentAttention(kv_rank=2, plain=2, rotated=2, value=2)}, "latent attention (mla)"),
        (DEEPSEEK, {"mla": None, "moe": None}, "deepseek_v3 format has no way to say: mla null; moe null"),
        (DEEPSEEK, {"norm_eps": 1e-5}, "norm_eps 1e-05, which is 1e-06 in the norms of latent attention"),
        (DEEPSEEK, {"moe": {"bias": False}}, "moe.bias false (true with routing.bias_rate 0 is the same)"),
        (DEEPSEEK, {"moe": {"scores": "softmax"}}, "moe.scores softmax"),
        (DEEPSEEK, {"moe": {"groups": 256}}, "moe.groups of one expert"),
        (DEEPSEEK, {"qk_norm": True, "embedding_norm": True}, "embedding_norm true; qk_norm true"),
    ],
)
def test_experts_that_the_format_cannot_express_are_not_written(config, change, said):
    original = model(config)
    if isinstance(change.get("moe"), dict):
        change = change | {"moe": original.moe.model_copy(update=change["moe"])}
    with pytest.raises(UserError) as refused:
        hf_config(original.model_copy(update=change), TokenIds(), "float32")
    assert said in str(refused.value)


def test_an_empty_generation_config_hides_no_id():
    config = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    wanted = TokenIds(bos=1, eos=(2,), pad=0)
    assert token_ids(config) == token_ids(config, {}) == token_ids(config, {"eos_token_id": None}) == wanted


def test_a_generation_configs_list_of_end_tokens_wins():
    assert token_ids({"eos_token_id": 2}, {"eos_token_id": [5, 2]}).eos == (5, 2)
    assert token_ids({"eos_token_id": [7, 8]}).eos == (7, 8)
    assert hf_config(model(LLAMA), TokenIds(eos=(7, 8)), "float32")["eos_token_id"] == [7, 8]


def test_the_files_of_a_directory_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 9}))
    assert model(read_config(str(tmp_path))) == model(LLAMA)
    assert weights_directory(str(tmp_path)) == tmp_path
    assert read_token_ids(tmp_path).eos == (9,)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read_token_ids(tmp_path).eos == (9,)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        (b'{\n"a": 1,\n', "line 3: not JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b"[1]", "holds a list, not an object"),
    ],
)
def test_a_broken_config_is_named_by_file_and_line(tmp_path, content, said):
    file = tmp_path / "config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as refused:
        read_json(file)
    assert said in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_hub_id_is_fetched_and_what_the_hub_says_is_passed_on(tmp_path, monkeypatch):
    import huggingface_hub

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda source, name: str(tmp_path / name))
    assert model(read_config("owner/name")) == model(LLAMA)

    def fails(*_, **__):
        raise OSError("404: no such repository\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(UserError, match=r"owner/name is no directory here, .*: 404: no such repository$"):
        weights_directory("owner/name")
    with pytest.raises(UserError, match="neither a directory nor a hub id"):
        read_config("./nowhere/at/all")
