"""The experts of a layer in Hugging Face's files: one tensor an expert, as on the hub, or all of a layer fused.

transformers 5 has them fused in memory and writes them one by one, unless it is told not to; both are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.model.hf_entry import AnyEntry, Entry, Halves, Shape, Stacked, same


@dataclass(frozen=True)
class ExpertNames:
    """What the files of a model type call the parts of a mixture, behind `model.layers.N.`."""

    mixture: str
    """The module that holds the router, the experts and what they share."""
    gate: str
    """Of one expert, behind its number: the projection inside the activation."""
    up: str
    """The projection that is multiplied with it."""
    down: str
    """The projection back."""


MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
QWEN = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
FUSED = "mlp"
"""The module that holds fused experts, whatever the model type."""


def feed_forward(ours: str, prefix: str, gate: str, up: str, down: str, shape: Shape) -> Entry:
    """A matrix of one feed-forward: `shape` is that of ours, and its name tells which."""
    if "gate_up" in ours:
        half = (shape[0] // 2, *shape[1:])
        return Entry(ours, {f"{prefix}.{part}.weight": half for part in (gate, up)}, groups=half[0])
    return same(ours, f"{prefix}.{down}.weight", shape)


def one_by_one(names: ExpertNames, ours: str, layer: str, shape: Shape) -> Stacked:
    """All experts' gate_up or down, each of them in tensors of its own below `layer`."""
    matrices = [
        feed_forward(ours, f"{layer}.{names.mixture}.experts.{number}", names.gate, names.up, names.down, shape[1:])
        for number in range(shape[0])
    ]
    return Stacked(ours, matrices)


def fused(ours: str, layer: str, shape: Shape) -> AnyEntry:
    """All experts' gate_up or down in one tensor below `layer`."""
    if ours.endswith("gate_up"):
        return Halves(ours, f"{layer}.{FUSED}.experts.gate_up_proj", shape)
    return same(ours, f"{layer}.{FUSED}.experts.down_proj", shape)
