"""Runs torchtitan (pip install torchtitan==0.2.2) on the models of this folder with random tokens.

    torchrun --nproc_per_node 1 benchmarks/torchtitan_peer.py --training.seq_len=8192 --compile.enable
    torchrun --nproc_per_node 2 benchmarks/torchtitan_peer.py --training.seq_len=32768 --compile.enable \
        --parallelism.context_parallel_degree=2 --activation_checkpoint.mode=full
    torchrun --nproc_per_node 1 benchmarks/torchtitan_peer.py --model.name=qwen3 --model.flavor=moe6 --compile.enable \
        --training.seq_len=4096 --training.local_batch_size=2 --activation_checkpoint.mode=none
    torchrun --nproc_per_node 8 benchmarks/torchtitan_peer.py --model.flavor=8B --compile.enable \
        --training.seq_len=8192 --activation_checkpoint.mode=none
    torchrun --nproc_per_node 8 benchmarks/torchtitan_peer.py --model.name=qwen3 --model.flavor=moe24 --compile.enable \
        --training.seq_len=4096 --training.local_batch_size=2 --parallelism.expert_parallel_degree=8 \
        --activation_checkpoint.mode=none

Further flags are torchtitan's own; its log says tokens a second and GPU (`tps`).
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

VOCAB = 128_256
FLAGS = (
    "--model.name=llama3",
    "--model.flavor=dense16",
    "--training.steps=25",
    "--training.local_batch_size=1",
    "--metrics.log_freq=5",
)


def random_sequences(dataset: Any) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Sequences without end, in the form in which torchtitan's dataset gives them."""
    while True:
        tokens = torch.randint(1, VOCAB, (dataset.seq_len + 1,))
        yield {"input": tokens[:-1]}, tokens[1:]


def take_length_alone(
    dataset: Any, dataset_name: str, dataset_path: str | None, tokenizer: Any, seq_len: int = 2048, *_: Any, **__: Any
) -> None:
    """In place of the dataset's constructor, which would look for its files."""
    dataset.seq_len = seq_len


def prepare() -> None:
    """Give torchtitan the model and the tokens."""
    import torchtitan.protocols.train_spec as specs
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
    from torchtitan.models.qwen3 import qwen3_args

    class NoTokenizer(BaseTokenizer):
        """torchtitan asks for a tokenizer; random tokens need its vocabulary's size alone."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()
            self.eos_id = 0

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCAB

    llama3_args["dense16"] = TransformerModelArgs(
        dim=4096, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024, rope_theta=500_000
    )
    HuggingFaceTextDataset.__init__ = take_length_alone
    HuggingFaceTextDataset.__iter__ = random_sequences
    HuggingFaceTextDataset.state_dict = lambda dataset: {}
    HuggingFaceTextDataset.load_state_dict = lambda dataset, state: None
    for layers in (6, 24):
        qwen3_args[f"moe{layers}"] = copy.deepcopy(qwen3_args["30B-A3B"])
        qwen3_args[f"moe{layers}"].n_layers = layers
    for name in ("llama3", "qwen3"):
        spec = specs.get_train_spec(name)
        spec.build_tokenizer_fn = NoTokenizer
        specs.register_train_spec(name, spec)  # what is registered goes before what torchtitan brings


if __name__ == "__main__":
    # torchtitan reads the flags when it is imported.
    sys.argv[1:] = [*FLAGS, f"--job.dump_folder={tempfile.mkdtemp()}", *sys.argv[1:]]
    prepare()
    from torchtitan.train import Trainer, main

    main(Trainer)
