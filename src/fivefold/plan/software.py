"""The software that a run is planned for: which generation of kernels, how it keeps its state, what it does again.

A plan of one's own run is for this project; a published run is for the stack that ran it. Fitted rates belong to a
generation of kernels (`constants.py`), of which there are five; what is documented about a stack stands here. Imports
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fivefold.config.run import Precision
from fivefold.errors import UserError
from fivefold.near import did_you_mean
from fivefold.pipeline.stage_bytes import master_bytes, reduce_bytes

UNFUSED, FLASH, COMPILED, ENGINE, LATEST = "unfused-2022", "flash-2023", "compiled-2024", "engine-2025", "engine-2026"
GENERATIONS = (UNFUSED, FLASH, COMPILED, ENGINE, LATEST)
"""Kernels of 2022, whose attention writes its scores to memory; the first flash attention, eager, of 2023; compiled
pointwise operations beside torch's attention, 2024; Transformer Engine with cuDNN's attention, until early 2026; and
since then, with experts that no longer wait for the host."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter of what is there all the time."""

    weights: float
    """In the compute format, as matrix products read them; 0 where they are gathered from the master weights."""
    gradients: float
    """As they are accumulated."""
    optimizer: float
    """Master weights and moments."""
    extra: float = 0.0
    """What the stack was measured to hold beside its formula."""

    @property
    def total(self) -> float:
        """All of them, unsharded."""
        return self.weights + self.gradients + self.optimizer + self.extra


STATES: dict[str, StateBytes] = {
    "fivefold": StateBytes(0, 4, 12),
    "fsdp2": StateBytes(0, 4, 12),
    "fsdp1": StateBytes(0, 4, 12),
    "fsdp1-pure": StateBytes(0, 2, 6),
    "maxtext": StateBytes(0, 4, 12),
    "megatron": StateBytes(2, 4, 12),
    "megatron-16bit": StateBytes(2, 2, 12),
    "deepspeed-2022-fp16": StateBytes(2, 2, 12, extra=1.5),
    "deepspeed-2022-bf16": StateBytes(2, 4, 12, extra=3.5),
    "internevo": StateBytes(2, 2, 12),
    "deepseek": StateBytes(2, 4, 8),
}
"""By software stack. FSDP keeps fp32 weights, gradients and two moments (MosaicML's PURE: all in bf16) and gathers what
it computes with; Megatron keeps 16-bit weights and fp32 gradients beside fp32 master weights and moments (18 bytes);
DeepSpeed of 2022 held about 1.5 bytes a parameter above its formula, in bf16 also the 16-bit gradients beside the sum;
InternEvo accumulates in 16 bits; DeepSeek-V3 keeps its moments in bf16 (DeepSeek-AI 2024, section 3.3.3)."""


@dataclass(frozen=True)
class Software:
    """What a run is executed by."""

    name: str
    """A key of `STATES`."""
    generation: str
    """One of `GENERATIONS`."""
    state: StateBytes
    sequence_parallel: bool = True
    """Whether the ranks of tp hold different tokens between the matrix products."""
    dropout: bool = False
    """Whether attention's probabilities and the residual updates have dropout."""
    selective: frozenset[str] = frozenset({"norm", "activation", "rope"})
    """What selective recompute does again: parts of a layer by name (`time/work.py`), `attention` with its products."""
    overlaps_gradients: bool = True
    """Whether the reduction of gradients and the gathering of parameters run beside computation."""
    tp_overlap: Literal["none", "backward", "all"] = "none"
    """Which of tp's collectives run beside matrix products: none; in backward that of the input's gradient beside the
    weight's (Megatron since 2022); or all, cut into pieces."""
    fused_accumulation: bool = False
    """Whether the product that makes a weight's gradient adds it to what is there, instead of another kernel."""
    whole_transfers: bool = False
    """Whether each rank of tp sends the whole activation to the next stage, and no two of a rank's transfers at a time
    (DeepSpeed's pipeline of 2022); else each sends its part, and sending and receiving happen together."""
    ep_overlap: bool = False
    """Whether the exchange of rows between experts runs beside the computation of another microbatch."""
    shared_meanwhile: bool = False
    """Whether shared experts are computed while rows travel to the others."""
    ep_once: Literal["choice", "node", "rank"] = "choice"
    """What a token's row is sent once for: each of its experts; each node of these (DeepEP, HybridEP), while rows are
    spread inside nodes; or each node, and then each rank."""
    narrow_activations: bool = False
    """Whether with 8-bit products what they and the activation read is kept in 8 bits, and the experts' output, weighed
    before their last product, is not kept."""
    reduces_each_microbatch: bool = False
    """Whether sharded gradients are reduced after each microbatch, instead of once a step."""
    hot_experts: float = 1.0
    """Rows that the busiest rank of ep gets in a layer, over the mean of its ranks: what routing makes of it."""


def fivefold(zero: int = 1, pp: int = 1) -> Software:
    """This project: compiled pointwise operations, cuDNN's attention, experts that do not wait for the host.

    With ZeRO 2 and 3 and no pipeline each microbatch reduces. What it was measured at on H200s is in docs/speed.md.
    """
    return Software(
        "fivefold",
        LATEST,
        STATES["fivefold"],
        tp_overlap="backward",
        fused_accumulation=True,
        shared_meanwhile=True,
        ep_once="rank",
        reduces_each_microbatch=zero >= 2 and pp == 1,
    )


STACKS: dict[str, Software] = {
    "fivefold": fivefold(),
    "megatron-2022": Software("megatron", UNFUSED, STATES["megatron"], tp_overlap="backward", fused_accumulation=True),
    "deepspeed-2022": Software(
        "deepspeed-2022-bf16",
        UNFUSED,
        STATES["deepspeed-2022-bf16"],
        sequence_parallel=False,
        overlaps_gradients=False,
        whole_transfers=True,
    ),
    "fsdp-2023": Software("fsdp1", FLASH, STATES["fsdp1"], sequence_parallel=False, reduces_each_microbatch=True),
    "torchtitan-2024": Software("fsdp2", COMPILED, STATES["fsdp2"], reduces_each_microbatch=True),
    "megatron-2025": Software(
        "megatron", ENGINE, STATES["megatron"], tp_overlap="all", fused_accumulation=True, ep_once="node"
    ),
    "megatron-2026": Software(
        "megatron",
        LATEST,
        STATES["megatron"],
        tp_overlap="all",
        fused_accumulation=True,
        ep_overlap=True,
        ep_once="node",
    ),
    "deepseek-2024": Software(
        "deepseek",
        LATEST,
        STATES["deepseek"],
        selective=frozenset({"norm", "activation", "up_projection"}),
        fused_accumulation=True,
        ep_overlap=True,
        ep_once="node",
        narrow_activations=True,
    ),
}
"""Whole stacks by name, to ask what a run would have taken with the software of its time. DeepSeek-V3's own kernels had
in 2024 what others got in 2026: experts that wait for no host, and beside whose exchange another microbatch runs."""


def in_formats(software: Software, precision: Precision) -> Software:
    """The stack as it keeps its state in a run's formats: ours follows them, published ones are as they were."""
    if software.name != "fivefold":
        return software
    state = StateBytes(0, reduce_bytes(precision), 3 * master_bytes(precision))
    return replace(software, state=state)


def stack(name: str) -> Software:
    """A stack by its name. Raises UserError if there is none of it."""
    if name not in STACKS:
        raise UserError(
            f"there is no software called {name}; {did_you_mean(name, STACKS)}known are {', '.join(STACKS)}"
        )
    return STACKS[name]
