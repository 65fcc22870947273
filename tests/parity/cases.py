"""What a layout is compared on: a model whose sizes hide nothing, and a batch with unequal labels."""

# b sequences  s tokens

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fivefold.config.run import Model, Optim
from fivefold.data.loader import IGNORE

GLOBAL_SIZE, SEQ_LEN, STEPS, LR = 8, 24, 3, 1e-2
OPTIM = Optim(lr=0.5, clip=1e-2, eps=1e-5, betas=(0.8, 0.9), weight_decay=0.3)
"""The clip is always active, so that a wrong norm reaches the weights; no value is a default of ours or of torch, and
a step is given a rate of its own, LR."""
LLAMA = Model(layers=5, hidden=48, heads=12, kv_heads=4, head_dim=6, ffn=40, vocab=1003, context=64)
BLOOM = LLAMA.model_copy(
    update={
        "family": "bloom",
        "norm": "layernorm",
        "activation": "gelu",
        "bias": True,
        "position": "alibi",
        "embedding_norm": True,
        "kv_heads": 12,
    }
)
MODELS = {
    "llama": LLAMA,
    "llama-tied": LLAMA.model_copy(update={"tied": True}),
    "qwen3": LLAMA.model_copy(update={"qk_norm": True}),
    "narrow": LLAMA.model_copy(update={"hidden": 6, "heads": 3, "kv_heads": 1, "head_dim": 2, "ffn": 5}),
    "bloom-tied": BLOOM.model_copy(update={"tied": True}),
}


@dataclass(frozen=True)
class Case:
    """One layout of one model."""

    model: str
    zero: int
    micro_size: int
    packed: bool

    def __str__(self) -> str:
        return f"{self.model} zero{self.zero} micro{self.micro_size}{' packed' if self.packed else ''}"


@dataclass(frozen=True)
class Batch:
    """A whole global batch."""

    tokens_bs: Tensor
    labels_bs: Tensor
    documents_bs: Tensor


def batch(step: int, packed: bool) -> Batch:
    """The batch of a step: sequences have from 1 to all labels, documents of every length from 1."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, 1003, (GLOBAL_SIZE, SEQ_LEN + 1), generator=generator)
    labels_bs = rows[:, 1:].clone()
    for row, count in enumerate((24, 1, 7, 24, 13, 24, 2, 19)):
        labels_bs[row, count:] = IGNORE
    documents_bs = torch.zeros_like(labels_bs, dtype=torch.int32)
    if packed:
        starts = torch.rand(GLOBAL_SIZE, SEQ_LEN, generator=generator) < 0.2
        starts[:, 0] = False
        documents_bs = starts.cumsum(dim=1).to(torch.int32)
    return Batch(rows[:, :-1].clone(), labels_bs, documents_bs)


def randomize_vectors(module: nn.Module) -> None:
    """Give norms and biases random values: those that they start from hide faults. By name, the same on any layout."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for number, (_, parameter) in enumerate(module.named_parameters()):
        if parameter.ndim > 1:
            continue
        generator = torch.Generator().manual_seed(1000 + number)
        value = 0.5 + torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                shard = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.to_local().copy_(shard.to_local())
            else:
                parameter.copy_(value)
