"""Tiny random transformers models, their directories and a tiny tokenizer, for the tests of Hugging Face in and out."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fivefold.config.huggingface import TokenIds, read_token_ids
from fivefold.model.hf_export import export
from tests.model.hf_directories import adaptor_of, opened, read_model

LLAMA_SIZES = {
    "vocab_size": 1003,
    "hidden_size": 96,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Random values for everything, also biases and norms, which start as zeros and ones and hide faults."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name or "ln_f" in name else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(centre * (not name.endswith("bias")) + 0.15 * noise)
    return model.eval()


def llama(**change) -> PreTrainedModel:
    return randomize(LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES | change)))


def qwen3(**change) -> PreTrainedModel:
    return randomize(Qwen3ForCausalLM(Qwen3Config(**LLAMA_SIZES | {"head_dim": 24} | change)))


def bloom(**change) -> PreTrainedModel:
    sizes = {"vocab_size": 1003, "hidden_size": 96, "n_layer": 3, "n_head": 12, "bos_token_id": None, "eos_token_id": 0}
    return randomize(BloomForCausalLM(BloomConfig(**sizes | change)))


def saved(model: PreTrainedModel, directory: Path) -> Path:
    """`model` as transformers itself writes it."""
    model.save_pretrained(directory)
    return directory


def exported(directory: Path, target: Path, **options) -> Path:
    """What `directory` holds, through our parameters, as we write it."""
    model, weights = read_model(directory), opened(directory)
    ids = read_token_ids(directory)
    export(target, model, adaptor_of(model), weights.parameter, ids, **{"tokenizer": None} | options)
    return target


def tokenizer_file(directory: Path, vocab: int = 300) -> Path:
    """A byte-level BPE with the end-of-document token <|endoftext|> as id 0, as `tokenizer.json` in `directory`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the cat sat on the mat", "def main(): return the cat"] * 4, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


END = TokenIds(eos=(0,))
