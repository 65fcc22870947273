"""What layouts are compared on: a layout of a model, models whose sizes hide nothing, a batch with unequal labels."""

# b sequences  s tokens

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from fivefold.config.run import Batch as BatchSizes
from fivefold.config.run import (
    Data,
    Experts,
    LatentAttention,
    Loss,
    Model,
    Optim,
    Parallel,
    Precision,
    Recompute,
    RopeScaling,
    Routing,
    Run,
    Source,
)
from fivefold.data.loader import IGNORE, Microbatch, Step, sample_numbers
from tests.parity.pieces import fill

GLOBAL_SIZE, SEQ_LEN, STEPS, LR = 8, 24, 2, 1e-2
LABELS = (24, 1, 7, 0, 13, 24, 2, 19)
"""Of each sequence: other numbers on each rank and in each microbatch, one without any."""
NEAR = 8
"""Ranks of a node; no layout here has more."""
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
MLA = LLAMA.model_copy(
    update={
        "layers": 2,
        "kv_heads": "auto",
        "head_dim": "auto",
        "mla": LatentAttention(q_rank=20, kv_rank=10, plain=6, rotated=4, value=5),
        "rope_scaling": RopeScaling(type="yarn", factor=8.0, original_context=8, mscale=1.5, mscale_all_dim=0.7),
    }
)
WIDE_MLA = {"mla": LatentAttention(q_rank=48, kv_rank=32, plain=12, rotated=8, value=12), "kv_heads": "auto"}
WIDE = {"layers": 4, "hidden": 96, "heads": 8, "kv_heads": 8, "head_dim": 12, "ffn": 160, "vocab": 16, "context": 512}
THREE = {"kv_heads": 3, "ffn": 42}
MODELS = {
    "llama": LLAMA,
    "llama-tied": LLAMA.model_copy(update={"tied": True}),
    "llama-kv3": LLAMA.model_copy(update=THREE),
    "llama-layer": LLAMA.model_copy(update={"layers": 1}),
    "llama-9": LLAMA.model_copy(update={"layers": 9}),
    "llama-9-tied": LLAMA.model_copy(update={"layers": 9, "tied": True}),
    "llama-two-layers": LLAMA.model_copy(update={"layers": 2}),
    "wide": LLAMA.model_copy(update=WIDE),
    "wide-bloom": BLOOM.model_copy(update=WIDE),
    "qwen3": LLAMA.model_copy(update={"qk_norm": True}),
    "narrow": LLAMA.model_copy(
        update={"hidden": 6, "heads": 4, "kv_heads": 2, "head_dim": 2, "ffn": 10, "vocab": 13, "layers": 2}
    ),
    "mla": MLA,
    "mla-4": MLA.model_copy(update={"layers": 4}),
    "wide-mla": LLAMA.model_copy(update=WIDE | WIDE_MLA),
    "mla-no-q-rank": MLA.model_copy(update={"mla": MLA.mla.model_copy(update={"q_rank": None})}),
    "bloom": BLOOM,
    "bloom-tied": BLOOM.model_copy(update={"tied": True}),
    "bloom-6": BLOOM.model_copy(update={"heads": 6, "kv_heads": 6, "ffn": 42}),
    "bloom-12": BLOOM.model_copy(update={"ffn": 42}),
    "mtp": LLAMA.model_copy(update={"layers": 4, "mtp": 1}),
    "mtp-2": LLAMA.model_copy(update={"layers": 2, "mtp": 2}),
    "mtp-2-tied": LLAMA.model_copy(update={"layers": 4, "mtp": 2, "tied": True}),
    "mtp-bloom": BLOOM.model_copy(update={"layers": 2, "mtp": 1}),
}
EXPERTS = Experts(experts=6, top_k=2, ffn=10)
SPREAD_OF_BIASES = 0.1
"""From the lowest of a router's biases to the highest: scores differ by as much from token to token, and with a larger
one all tokens would choose the same experts."""
EIGHT = {"experts": 8, "top_k": 3}


def moe(experts: Experts = EXPERTS, **changes: Any) -> Model:
    """A small model with these experts, of which the first layer may have none."""
    return LLAMA.model_copy(update={"layers": 3, "moe": experts, **changes})


MODELS |= {
    "moe": moe(EXPERTS.model_copy(update={"normalize": False, "scale": 1.7})),
    "moe-top1": moe(EXPERTS.model_copy(update={"top_k": 1, "normalize": False})),
    "moe-sigmoid": moe(EXPERTS.model_copy(update={"scores": "sigmoid", "scale": 2.5, "shared": 1, "dense_layers": 1})),
    "moe-groups": moe(EXPERTS.model_copy(update={"groups": 3, "top_groups": 2, "top_k": 3})),
    "moe-bias": moe(
        EXPERTS.model_copy(
            update=EIGHT
            | {"scores": "sigmoid", "bias": True, "groups": 4, "top_groups": 2, "shared": 2, "dense_layers": 1}
        ),
        layers=4,
    ),
    "moe-sequence": moe(),
    "moe-global": moe(),
    "moe-capacity": moe(),
    "moe-full": moe(EXPERTS.model_copy(update=EIGHT)),
    "moe-empty": moe(EXPERTS.model_copy(update=EIGHT | {"top_k": 2, "bias": True})),
    "moe-three": moe(Experts(experts=3, top_k=2, ffn=3), layers=1),
    "moe-one": moe(EXPERTS.model_copy(update=EIGHT | {"top_k": 1, "bias": True}), layers=4),
}
UNWANTED = {"moe-empty": (0, 2, 3, 7), "moe-one": (0, 1, 2, 3, 4, 6, 7)}
"""Experts whose bias is so low that no token goes there."""
MODELS["mtp-moe"] = MODELS["moe-bias"].model_copy(update={"mtp": 2})
LOSSES = {
    **{name: Loss(mtp=0.7) for name in ("mtp", "mtp-2", "mtp-2-tied", "mtp-bloom")},
    "mtp-moe": Loss(mtp=0.7, balance_sequence=0.3, router_z=0.05),
    "moe-sequence": Loss(balance_sequence=0.7, router_z=0.05),
    "moe-global": Loss(balance_global=0.9, router_z=0.05),
    "moe-bias": Loss(balance_sequence=0.3),
}
ROUTING = {
    **dict.fromkeys(("moe-capacity", "moe-full"), Routing(capacity_factor=0.9)),
    "moe-bias": Routing(bias_rate=0.05),
}
ROUTING["mtp-moe"] = ROUTING["moe-bias"]


@dataclass(frozen=True)
class Case:
    """A layout of a model; its text is the test's id, without what is as usual."""

    model: str
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    layers: tuple[int, ...] = ()
    """Of each stage; none for those that balance it."""
    tp: int = 1
    cp: int = 1
    ep: int = 1
    near: int = NEAR
    """Ranks of a node."""
    method: str = "ring"
    dp: int = 1
    replicate: int = 1
    zero: int = 1
    recompute: str = "none"
    every: int = 1
    offload: tuple[str, ...] = ()
    micro: int | None = None
    """Sequences of a microbatch; None for two microbatches a step, or one on more than two ranks, to save time."""
    packed: bool = False
    rows: int = GLOBAL_SIZE
    """Sequences of a step."""
    steps: int = STEPS
    fault: str = ""
    """What is done wrong on purpose: a name in `faults.FAULTS`."""

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.pp * self.tp * self.cp * self.dp

    @property
    def micro_size(self) -> int:
        """Sequences of a microbatch."""
        if self.micro is not None:
            return self.micro
        return self.rows // self.dp // (2 if self.world <= 2 else 1)

    @property
    def parallel(self) -> Parallel:
        """The run file's section."""
        degrees = {name: getattr(self, name) for name in ("pp", "chunks", "tp", "cp", "ep", "dp", "replicate", "zero")}
        layers = list(self.layers) if self.layers else "auto"
        return Parallel(**degrees, schedule=self.schedule, layers_per_stage=layers, cp_method=self.method)  # type: ignore[arg-type]

    @property
    def run(self) -> Run:
        """The run file."""
        return Run(
            name="parity",
            steps=self.steps,
            model=MODELS[self.model],
            data=Data(train=[Source(path=Path("none"))], seq_len=SEQ_LEN),
            batch=BatchSizes(global_size=self.rows, micro_size=self.micro_size),
            parallel=self.parallel,
            precision=Precision(compute="fp64"),
            recompute=Recompute(mode=self.recompute, every=self.every),  # type: ignore[arg-type]
            offload=list(self.offload),  # type: ignore[arg-type]
            loss=LOSSES.get(self.model, Loss()),
            routing=ROUTING.get(self.model, Routing()),
        )

    def __str__(self) -> str:
        words = [self.model]
        words += [f"pp{self.pp}", self.schedule] if self.pp > 1 else []
        words += [f"chunks{self.chunks}"] if self.chunks > 1 else []
        words += ["layers" + "-".join(map(str, self.layers))] if self.layers else []
        words += [f"{axis}{getattr(self, axis)}" for axis in ("tp", "cp", "ep") if getattr(self, axis) > 1]
        words += [f"near{self.near}"] if self.near != NEAR else []
        words += [self.method] if self.cp > 1 else []
        words += [f"dp{self.dp}"] if self.dp > 1 else []
        words += [f"replicate{self.replicate}"] if self.replicate > 1 else []
        words += [f"zero{self.zero}"] if self.dp * self.cp > 1 or self.zero != 1 else []
        words += [self.recompute] if self.recompute != "none" else []
        words += [f"every{self.every}"] if self.every > 1 else []
        words += [f"offload-{what}" for what in self.offload]
        words += [f"micro{self.micro}"] if self.micro is not None else []
        words += [f"rows{self.rows}"] if self.rows != GLOBAL_SIZE else []
        words += ["packed"] * self.packed + ([self.fault] if self.fault else [])
        return " ".join(words)


@dataclass(frozen=True)
class Batch:
    """A whole global batch."""

    tokens_bs: Tensor
    labels_bs: Tensor
    documents_bs: Tensor


def batch(step: int, packed: bool, vocab: int, size: int = GLOBAL_SIZE) -> Batch:
    """The batch of a step: sequences have from none to all labels, documents of every length from 1."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, vocab, (size, SEQ_LEN + 1), generator=generator)
    rows[:, ::3] = edges(vocab)[rows[:, ::3] % len(edges(vocab))]
    labels_bs = rows[:, 1:].clone()
    for row, count in enumerate(LABELS[:size]):
        labels_bs[row, count:] = IGNORE
    documents_bs = torch.zeros_like(labels_bs, dtype=torch.int32)
    if packed:
        starts = torch.rand(size, SEQ_LEN, generator=generator) < 0.2
        starts[:, 0] = False
        documents_bs = starts.cumsum(dim=1).to(torch.int32)
    return Batch(rows[:, :-1].clone(), labels_bs, documents_bs)


def edges(vocab: int) -> Tensor:
    """The words at the ends of what 1 to 4 ranks have of a vocabulary, where a cut that is off by one is seen."""
    cuts = {min(-(-vocab // ranks) * number, vocab) for ranks in (1, 2, 3, 4) for number in range(ranks + 1)}
    return torch.tensor(sorted({word for cut in cuts for word in (cut - 1, cut) if 0 <= word < vocab}))


def share_of(case: Case, step: int, dp_rank: int) -> Step:
    """One rank's microbatches of the batch of a step."""
    vocab = MODELS[case.model].vocab
    assert vocab != "auto"
    whole = batch(step, case.packed, vocab, case.rows)
    microbatches = [
        Microbatch(whole.tokens_bs[rows], whole.labels_bs[rows], whole.documents_bs[rows], case.packed)
        for rows in torch.from_numpy(sample_numbers(0, case.rows, case.micro_size, dp_rank, case.dp))
    ]
    ahead = tuple(labels_ahead(whole, depth) for depth in range(1, MODELS[case.model].mtp + 1))
    return Step(microbatches, int((whole.labels_bs >= 0).sum()), 0, case.rows, mtp_labels=ahead)


def labels_ahead(whole: Batch, depth: int) -> int:
    """Labels that are `depth` places further on in the same document."""
    same = whole.documents_bs[:, depth:] == whole.documents_bs[:, :-depth]
    return int((same & (whole.labels_bs[:, depth:] >= 0)).sum())


def randomize_vectors(model: str, parameters: Mapping[str, Any]) -> None:
    """Give norms and biases random values: those that they start from hide faults. The same on any layout."""
    for name, parameter in parameters.items():
        if parameter.ndim == 1:
            generator = torch.Generator().manual_seed(crc32(name.encode()))
            values = 0.5 + torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("router.bias"):
                values = SPREAD_OF_BIASES * (values - 1)
                values[list(UNWANTED.get(model, ()))] = -1e9
            fill(parameter, values)
