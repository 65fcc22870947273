"""transformers generates text from an export, and stops at the end token that the export names."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, pipeline

from fivefold.config.huggingface import TokenIds
from fivefold.model.hf_export import export
from tests.model.hf_directories import adaptor_of, opened, read_model
from tests.model.hf_models import bloom, exported, llama, saved, tokenizer_file


@torch.no_grad()
def forced_to(model: PreTrainedModel, token: int) -> PreTrainedModel:
    """A model that always predicts `token`: all its layers add nothing, all embeddings are one direction."""
    for name, parameter in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.zero_()
    direction = model.model.embed_tokens.weight[0].clone()
    model.model.embed_tokens.weight.copy_(direction.expand_as(model.model.embed_tokens.weight))
    model.lm_head.weight.zero_()
    model.lm_head.weight[token] = model.model.norm.weight * direction
    return model


@pytest.mark.parametrize(("make", "change"), [(llama, {}), (llama, {"tie_word_embeddings": True}), (bloom, {})])
def test_the_text_generation_pipeline_runs_on_an_export(tmp_path, make, change):
    source = saved(make(vocab_size=300, **change), tmp_path / "theirs")
    target = exported(source, tmp_path / "ours", tokenizer=tokenizer_file(tmp_path / "tokenizer"))
    generate = pipeline("text-generation", model=str(target))
    text = generate("the cat", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert text.startswith("the cat")
    assert len(text) > len("the cat")


@pytest.mark.parametrize("eos", [(7,), (0, 7)])
def test_generation_stops_at_the_end_token(tmp_path, eos):
    source = saved(forced_to(llama(), 7), tmp_path / "theirs")
    model, weights = read_model(source), opened(source)
    export(tmp_path / "ours", model, adaptor_of(model), weights.parameter, TokenIds(eos=eos), None)
    prompt = torch.tensor([[1, 2, 3]])
    generated = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").generate(prompt, max_new_tokens=20)
    assert generated.tolist() == [[1, 2, 3, 7]]


def test_an_end_token_that_only_config_json_names_is_kept_when_generation_config_is_empty(tmp_path):
    """The fault seen elsewhere: an empty generation_config.json hid config.json's end token, and nothing stopped."""
    source = saved(forced_to(llama(eos_token_id=7), 7), tmp_path / "theirs")
    (source / "generation_config.json").write_text("{}")
    target = exported(source, tmp_path / "ours")
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == 7
    assert GenerationConfig.from_pretrained(target).eos_token_id == 7
    generated = AutoModelForCausalLM.from_pretrained(target).generate(torch.tensor([[1]]), max_new_tokens=20)
    assert generated.tolist() == [[1, 7]]
