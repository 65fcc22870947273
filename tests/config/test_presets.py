"""The presets hold the published sizes, and nothing but the architecture."""

import pytest
from ruamel.yaml import YAML

from fivefold.config.models import FOLDER, preset_names
from fivefold.config.rules import check
from fivefold.config.run import Data, Experts, LatentAttention, Model, RopeScaling, Run, Source
from fivefold.model.spec import parameters, train_flops_per_token

PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "bloom-176b": 176_247_271_424,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 682_636_472_320,
}

OURS = {
    "tiny-llama": (8192, "6.6", "6.6"),
    "tiny-bloom": (8192, "8.4", "8.4"),
    "small-llama": (32000, "128.4", "128.4"),
    "tiny-moe": (8192, "11.3", "6.6"),
    "tiny-switch": (8192, "17.6", "6.6"),
    "tiny-deepseek": (8192, "10.7", "7.1"),
}
"""Our own sizes: a vocabulary, and with it the millions of parameters in all and of a token, as their files say."""


def preset(name: str, vocab: int | None = None) -> Model:
    model = Model.model_validate(YAML(typ="safe").load((FOLDER / f"{name}.yaml").read_text()))
    return model if vocab is None else model.model_copy(update={"vocab": vocab})


def test_the_named_presets_are_there():
    assert set(preset_names()) == {*OURS, *PUBLISHED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_number_of_parameters(name):
    assert parameters(preset(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_says_where_its_numbers_come_from(name):
    assert (FOLDER / f"{name}.yaml").read_text().startswith("# Source: config.json of ")


@pytest.mark.parametrize("name", OURS)
def test_our_own_sizes_take_the_tokenizers_vocabulary_and_are_as_small_as_they_say(name):
    vocab, total, active = OURS[name]
    counts = parameters(preset(name, vocab))
    assert preset(name).vocab == "auto"
    assert (f"{counts.total / 1e6:.1f}", f"{counts.active / 1e6:.1f}") == (total, active)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", "46.7", "12.9"),
        ("qwen3-30b-a3b", "30.5", "3.4"),  # published as 3.3 B: 3.04 B without the embedding, 3.35 B with it
        ("qwen3-235b-a22b", "235.1", "22.2"),
    ],
)
def test_what_a_token_meets_of_the_experts_is_as_published(name, total, active):
    counts = parameters(preset(name))
    assert (f"{counts.total / 1e9:.1f}", f"{counts.active / 1e9:.1f}") == (total, active)


def test_deepseek_v3_is_671b_of_which_a_token_meets_37b_and_its_further_prediction_comes_on_top():
    """Without it and without the biases of the choice: what transformers counts, which leaves the prediction out."""
    main, whole = (parameters(preset("deepseek-v3").model_copy(update={"mtp": depth})) for depth in (0, 1))
    assert main.total == 671_026_404_352
    assert f"{main.active / 1e9:.1f}" == "37.6"  # 36.6 without the embedding, of which a token meets one row
    assert whole.total - main.total == whole.mtp == 11_610_067_968
    block = main.moe_layer + 2 * 7168**2 + 3 * 7168
    assert whole.mtp == block


@pytest.mark.parametrize("name", [*OURS, *PUBLISHED])
def test_a_preset_breaks_no_rule_on_one_rank(name):
    data = Data(train=[Source(path="x")], seq_len=128)
    assert check(Run(name="a", steps=1, model=preset(name), data=data)) == []


def test_a_token_of_tiny_moe_and_tiny_switch_takes_what_one_of_tiny_llama_does():
    models = [preset(name, 8192) for name in ("tiny-llama", "tiny-moe", "tiny-switch")]
    dense, *mixtures = [train_flops_per_token(model, 256) for model in models]
    routers = 6 * 4 * 8 * 256  # layers x experts x width
    assert mixtures == [dense + routers] * 2


def test_tiny_bloom_has_a_head_count_that_is_no_power_of_two():
    heads = preset("tiny-bloom").heads
    assert heads & (heads - 1) != 0


def test_rope_of_the_llamas_is_as_published():
    names = ("llama-3.2-1b", "llama-3-8b", "llama-3-70b", "llama-3-405b")
    scaling = {name: preset(name).rope_scaling for name in names}
    assert scaling == {
        "llama-3.2-1b": RopeScaling(type="llama3", factor=32.0, original_context=8192),
        "llama-3-8b": None,
        "llama-3-70b": None,
        "llama-3-405b": RopeScaling(type="llama3", factor=8.0, original_context=8192),
    }
    assert {preset(name).rope_theta for name in names} == {500000.0}
    assert {name: preset(name).context for name in names} == {
        "llama-3.2-1b": 131072,
        "llama-3-8b": 8192,
        "llama-3-70b": 8192,
        "llama-3-405b": 131072,
    }


def test_qwen3_8b_has_head_norms_and_an_explicit_head_size():
    model = preset("qwen3-8b")
    assert (model.qk_norm, model.head_dim, model.rope_theta, model.norm_eps) == (True, 128, 1e6, 1e-6)


def test_what_deepseek_v3_says_of_routing_and_positions_is_as_published():
    model = preset("deepseek-v3")
    assert model.moe == Experts(
        experts=256,
        top_k=8,
        ffn=2048,
        shared=1,
        dense_layers=3,
        scores="sigmoid",
        normalize=True,
        scale=2.5,
        groups=8,
        top_groups=4,
        bias=True,
    )
    assert model.mla == LatentAttention(q_rank=1536, kv_rank=512, plain=128, rotated=64, value=128)
    assert model.rope_scaling == RopeScaling(
        type="yarn", factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0
    )
    assert (model.context, model.rope_theta, model.mtp, model.init_std) == (163840, 10000.0, 1, 0.006)


def test_a_token_of_tiny_switch_has_one_expert_and_the_probability_as_its_gate():
    moe = preset("tiny-switch").moe
    assert (moe.top_k, moe.scores, moe.normalize, moe.scale, moe.bias) == (1, "softmax", False, 1.0, False)


def rows_of_the_page() -> list[str]:
    """The table of docs/models.md: parameters with the vocabulary of the preset, or with the one in brackets."""
    rows = []
    for name in preset_names():
        vocab = OURS[name][0] if name in OURS else None
        model = preset(name, vocab)
        counts = parameters(model)
        active = f", {size(counts.active)} active" if model.moe else ""
        cells = [
            f"`{name}`",
            f"{size(counts.total)}{active}",
            model.layers,
            model.hidden,
            heads(model),
            feed_forward(model),
            f"auto ({vocab:,})" if vocab else f"{model.vocab:,}",
            f"{model.context:,}",
            f"{train_flops_per_token(model, model.context) / 1e9:,.4g}",
        ]
        rows.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return rows


def size(count: int) -> str:
    return f"{count / 1e9:,.2f}B" if count >= 1e9 else f"{count / 1e6:,.1f}M"


def heads(model: Model) -> str:
    if model.mla:
        return f"{model.heads} x ({model.mla.plain} + {model.mla.rotated}), latent {model.mla.kv_rank}"
    return f"{model.heads} / {model.key_value_heads} x {model.head_size}"


def feed_forward(model: Model) -> str:
    moe = model.moe
    if moe is None:
        return f"{model.ffn:,}"
    shared = f" + {moe.shared} shared" if moe.shared else ""
    first = f"; first {moe.dense_layers}: {model.ffn:,}" if moe.dense_layers else ""
    return f"{moe.top_k} of {moe.experts}{shared} x {moe.ffn:,}{first}"


def test_the_table_of_the_models_page_is_what_the_presets_say():
    page = (FOLDER.parents[3] / "docs/models.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `")][: len(preset_names())] == rows_of_the_page()
