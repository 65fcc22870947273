"""The presets hold the published sizes, and nothing but the architecture."""

import pytest
from ruamel.yaml import YAML

from fivefold.config.models import FOLDER, preset_names
from fivefold.config.run import Model, RopeScaling
from fivefold.model.spec import parameters, train_flops_per_token

PUBLISHED = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "bloom-176b": 176_247_271_424,
}


def preset(name: str, vocab: int | None = None) -> Model:
    model = Model.model_validate(YAML(typ="safe").load((FOLDER / f"{name}.yaml").read_text()))
    return model if vocab is None else model.model_copy(update={"vocab": vocab})


def test_the_named_presets_are_there():
    assert set(preset_names()) == {"tiny-llama", "tiny-bloom", "small-llama", *PUBLISHED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_number_of_parameters(name):
    assert parameters(preset(name)).total == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_says_where_its_numbers_come_from(name):
    assert (FOLDER / f"{name}.yaml").read_text().startswith("# Source: config.json of ")


@pytest.mark.parametrize(
    ("name", "vocab", "low", "high"),
    [("tiny-llama", 8192, 6e6, 10e6), ("tiny-bloom", 8192, 6e6, 10e6), ("small-llama", 32000, 115e6, 135e6)],
)
def test_our_own_sizes_take_the_tokenizers_vocabulary_and_are_as_small_as_they_say(name, vocab, low, high):
    assert preset(name).vocab == "auto"
    assert low <= parameters(preset(name, vocab)).total <= high


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-bloom", "small-llama", *PUBLISHED])
def test_heads_divide_the_width_and_the_key_value_heads_divide_the_heads(name):
    model = preset(name)
    assert model.hidden % model.heads == 0
    assert model.heads % model.key_value_heads == 0
    assert model.head_size % 2 == 0


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


def rows_of_the_page() -> list[str]:
    """The table of docs/models.md: parameters with the vocabulary of the preset, or with the one in brackets."""
    rows = []
    for name in preset_names():
        vocab = {"tiny-llama": 8192, "tiny-bloom": 8192, "small-llama": 32000}.get(name)
        model = preset(name, vocab)
        total = parameters(model).total
        size = f"{total / 1e9:,.2f}B" if total >= 1e9 else f"{total / 1e6:,.1f}M"
        shown = f"auto ({vocab:,})" if vocab else f"{model.vocab:,}"
        heads = f"{model.heads} / {model.key_value_heads} x {model.head_size}"
        flops = f"{train_flops_per_token(model, model.context) / 1e9:,.4g}"
        cells = [
            f"`{name}`",
            size,
            model.layers,
            model.hidden,
            heads,
            f"{model.ffn:,}",
            shown,
            f"{model.context:,}",
            flops,
        ]
        rows.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return rows


def test_the_table_of_the_models_page_is_what_the_presets_say():
    page = (FOLDER.parents[3] / "docs/models.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| `")][: len(preset_names())] == rows_of_the_page()
