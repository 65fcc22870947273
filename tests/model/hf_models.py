"""Tiny random transformers models, their directories and a tiny tokenizer, for the tests of Hugging Face in and out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
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
QWEN3_MOE_SIZES = LLAMA_SIZES | {
    "head_dim": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
DEEPSEEK_SIZES = LLAMA_SIZES | {
    "num_key_value_heads": 12,
    "num_hidden_layers": 3,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "num_mtp_layers": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def randomize(model: PreTrainedModel, std: float = 0.15) -> PreTrainedModel:
    """Random values for everything, also biases and norms, which start as zeros and ones and hide faults."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name or "ln_f" in name else 0.0
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(centre * (not name.endswith("bias")) + std * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def llama(**change) -> PreTrainedModel:
    return randomize(LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES | change)))


def qwen3(**change) -> PreTrainedModel:
    return randomize(Qwen3ForCausalLM(Qwen3Config(**LLAMA_SIZES | {"head_dim": 24} | change)))


def mixtral(**change) -> PreTrainedModel:
    sizes = LLAMA_SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2}
    return randomize(MixtralForCausalLM(MixtralConfig(**sizes | change)), std=0.1)


def qwen3_moe(**change) -> PreTrainedModel:
    return randomize(Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN3_MOE_SIZES | change)), std=0.1)


def deepseek(**change) -> PreTrainedModel:
    return randomize(DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK_SIZES | change)), std=0.1)


def biased(model: PreTrainedModel, bias: float) -> PreTrainedModel:
    """A DeepSeek-V3 with one bias for all experts, nearly, so that the scores still decide."""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.mul_(0.1).add_(bias)
    return model


def bloom(**change) -> PreTrainedModel:
    sizes = {"vocab_size": 1003, "hidden_size": 96, "n_layer": 3, "n_head": 12, "bos_token_id": None, "eos_token_id": 0}
    return randomize(BloomForCausalLM(BloomConfig(**sizes | change)))


def saved(model: PreTrainedModel, directory: Path, **options) -> Path:
    """`model` as transformers itself writes it."""
    model.save_pretrained(directory, **options)
    return directory


def in_fp8(directory: Path, target: Path, block: tuple[int, int]) -> Path:
    """`directory` with its projections in fp8, one fp32 scale a block, as DeepSeek-V3 was released."""
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        rows, columns = (-(-size // each) for size, each in zip(tensors[name].shape, block, strict=True))
        scales, stored = torch.empty(rows, columns), torch.empty_like(tensors[name], dtype=torch.float8_e4m3fn)
        for i in range(rows):
            for j in range(columns):
                where = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
                scales[i, j] = tensors[name][where].abs().max() / 448 * (1 + i + 3 * j)  # each block has its own
                stored[where] = (tensors[name][where] / scales[i, j]).to(torch.float8_e4m3fn)
        tensors |= {name: stored, f"{name}_scale_inv": scales}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return target


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
