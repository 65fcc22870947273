"""Our model and transformers' have the same logits on the same weights, in both directions, at every position."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fivefold.model.hf_export import export
from fivefold.model.hf_import import load_into
from fivefold.model.init import initialize
from fivefold.model.transformer import Transformer
from tests.config.test_presets import preset
from tests.model.hf_directories import adaptor_of, opened, read_model
from tests.model.hf_models import (
    END,
    LLAMA3,
    YARN,
    biased,
    bloom,
    deepseek,
    llama,
    mixtral,
    qwen3,
    qwen3_moe,
    saved,
)

TOKENS = torch.randint(0, 1003, (2, 160), generator=torch.Generator().manual_seed(3))
"""Longer than the 64 tokens at which the scaled models' original context ends."""

MODELS = {
    "llama": lambda: llama(),
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama with 3 of 12 key/value heads": lambda: llama(num_key_value_heads=3),
    "llama with all key/value heads": lambda: llama(num_key_value_heads=12),
    "llama with heads wider than hidden / heads": lambda: llama(head_dim=20),
    "llama with biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama with another theta": lambda: llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
    "llama with linear scaling": lambda: llama(rope_parameters={"rope_type": "linear", "factor": 4.0}),
    "llama with llama3 scaling": lambda: llama(rope_parameters=LLAMA3 | {"rope_theta": 500000.0}, head_dim=64),
    "llama with yarn scaling": lambda: llama(rope_parameters=YARN, head_dim=64),
    "llama with yarn scaling and its own edges": lambda: llama(
        rope_parameters=YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.3}, head_dim=64
    ),
    "qwen3": lambda: qwen3(),
    "qwen3 tied": lambda: qwen3(tie_word_embeddings=True),
    "mixtral": lambda: mixtral(),
    "mixtral tied": lambda: mixtral(tie_word_embeddings=True),
    "qwen3-moe with a dense layer": lambda: qwen3_moe(),
    "qwen3-moe with gates as they are": lambda: qwen3_moe(norm_topk_prob=False, mlp_only_layers=[]),
    "deepseek": lambda: deepseek(),
    "deepseek with queries from the residual stream": lambda: deepseek(q_lora_rank=None, num_experts_per_tok=4),
    "deepseek without groups, gates as they are": lambda: deepseek(
        n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.5
    ),
    "deepseek without shared experts": lambda: deepseek(n_shared_experts=0),
    "deepseek with biases of -5": lambda: biased(deepseek(), -5.0),
    "deepseek with yarn scaling": lambda: deepseek(
        rope_parameters=YARN | {"rope_theta": 1e4, "mscale": 1.2, "mscale_all_dim": 0.7}, qk_rope_head_dim=32
    ),
    "bloom with 6 heads": lambda: bloom(n_head=6),
    "bloom with 12 heads": lambda: bloom(n_head=12),
    "bloom with 8 heads, untied": lambda: bloom(n_head=8, tie_word_embeddings=False),
}


def loaded(directory) -> Transformer:
    """Our model with the weights of a Hugging Face directory, built as a run builds it: on meta, then filled."""
    with torch.device("meta"):
        module = Transformer(read_model(directory))
    module.to_empty(device="cpu")
    load_into(tensors_of(module), opened(directory))
    return module.eval()


def tensors_of(module: Transformer) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


@torch.no_grad()
def distance(ours: Transformer, theirs: PreTrainedModel) -> float:
    """Largest difference of any logit at any position."""
    return (ours(TOKENS) - theirs(TOKENS).logits).abs().max().item()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # shared experts 0 wide
@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saves_has_its_logits_here_and_what_we_export_has_ours_there(name, tmp_path):
    theirs = MODELS[name]()
    ours = loaded(saved(theirs, tmp_path / "theirs"))
    assert distance(ours, theirs) <= 1e-5
    model = read_model(tmp_path / "theirs")
    export(tmp_path / "ours", model, adaptor_of(model), tensors_of(ours).__getitem__, END, None)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(back) is type(theirs)
    assert distance(ours, back) <= 1e-5


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-bloom", "tiny-deepseek"])
def test_a_preset_with_weights_of_our_own_goes_out_and_comes_back_the_same(name, tmp_path):
    """Random biases and norms, because those of a fresh model are zeros and ones and hide faults."""
    model = preset(name, vocab=1003)
    ours = Transformer(model).eval()
    initialize(dict(ours.named_parameters()), model, seed=5)
    torch.manual_seed(5)
    with torch.no_grad():
        for tensor in tensors_of(ours).values():
            tensor.add_(0.05 * torch.randn_like(tensor))
    export(tmp_path / "hf", model, adaptor_of(model), tensors_of(ours).__getitem__, END, None)
    assert distance(ours, AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()) <= 1e-5
    back, originals = tensors_of(loaded(tmp_path / "hf")), tensors_of(ours)
    assert back.keys() == originals.keys()
    assert all(torch.equal(back[name], originals[name]) for name in back if not name.endswith("router.load"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama with linear scaling", {"factor": 2.0}),
        ("llama with llama3 scaling", {"factor": 2.0}),
        ("llama with llama3 scaling", {"original_context": 128}),
        ("llama with llama3 scaling", {"low_freq_factor": 2.0}),
        ("llama with llama3 scaling", {"high_freq_factor": 8.0}),
        ("llama with yarn scaling", {"factor": 2.0, "attention_factor": 0.1 * math.log(4.0) + 1}),
        ("llama with yarn scaling", {"original_context": 128}),
        ("llama with yarn scaling", {"attention_factor": 1.0}),
        ("llama with yarn scaling and its own edges", {"beta_fast": 8.0}),
        ("llama with yarn scaling and its own edges", {"beta_slow": 1.0}),
        ("deepseek with yarn scaling", {"mscale": 0.7}),
        ("deepseek with yarn scaling", {"mscale_all_dim": 1.2}),
        ("deepseek with yarn scaling", {"mscale": None, "mscale_all_dim": None}),
    ],
)
def test_the_logits_tell_whether_a_scaling_was_read(name, change, tmp_path):
    """Each field matters to the comparison above: with another value the logits are not those of transformers."""
    theirs = MODELS[name]()
    right = loaded(saved(theirs, tmp_path / "theirs"))
    scaling = right.model.rope_scaling.model_copy(update=change)
    wrong = Transformer(right.model.model_copy(update={"rope_scaling": scaling})).eval()
    wrong.load_state_dict(right.state_dict())
    assert distance(wrong, theirs) > 0.01
