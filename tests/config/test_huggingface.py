"""A config.json, in the style of transformers 4 or 5, becomes model fields, and back; what has no field is refused."""

import json

import pytest

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
from fivefold.config.run import Model
from fivefold.errors import UserError

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


def test_everything_unsupported_is_listed_at_once():
    with pytest.raises(UserError) as refused:
        model_fields(LLAMA | {"hidden_act": "relu", "attention_dropout": 0.5, "rope_scaling": {"type": "ntk"}})
    assert all(word in str(refused.value) for word in ("hidden_act", "attention_dropout", "rope type 'ntk'"))


def test_a_mistral_without_a_window_is_a_llama():
    assert model(MISTRAL) == model(LLAMA)


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
