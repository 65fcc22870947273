"""A stack of blocks written as the transformer's are, with calls counted: what activation policies are tested on."""

# b sequences  s positions  d model width  h query heads  g key/value heads  e head size  f feed-forward width

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold._torch import StorageReference, storage_reference
from fivefold.config.run import Recompute
from fivefold.kernels.linear import linear
from fivefold.kernels.rms_norm import add_rms_norm, rms_norm
from fivefold.kernels.rotary import rotate, rotation
from fivefold.kernels.swiglu import swiglu
from fivefold.model.activations import activation_policies

B, S, D, H, G, E, FF = 2, 7, 16, 4, 2, 6, 20
CHEAP = ("rms_norm", "split_and_turn", "add_rms_norm", "swiglu")
DEAR = {"linear": 4, "attend": 1}


class Shared:
    """What all blocks share."""

    def __init__(self, like: Tensor) -> None:
        frequencies = torch.linspace(1, 0.1, E // 2, dtype=like.dtype, device=like.device)
        self.turn = rotation(torch.arange(S, device=like.device), frequencies)


def split_and_turn(qkv_bso: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the fused product; the values are a view of it."""
    grouped = qkv_bso.unflatten(-1, (G, H // G + 2, E))
    q, k, v = grouped.split([H // G, 1, 1], dim=-2)
    return *rotate(q.flatten(2, 3), k.squeeze(3), cos, sin), v.squeeze(3)


def attend(q_bshe: Tensor, k_bsge: Tensor, v_bsge: Tensor) -> Tensor:
    """Causal attention, its heads joined."""
    q, k, v = (x.transpose(1, 2) for x in (q_bshe, k_bsge, v_bsge))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


FUNCTIONS = {
    "rms_norm": rms_norm,
    "split_and_turn": split_and_turn,
    "add_rms_norm": add_rms_norm,
    "swiglu": swiglu,
    "linear": linear,
    "attend": attend,
}


class Block(nn.Module):
    """Attention and SwiGLU with all cheap segments marked. `functions` are counted in `calls`, by name."""

    def __init__(self, policy: Any, functions: dict[str, Callable[..., Any]], generator: torch.Generator) -> None:
        super().__init__()

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.5 * torch.rand(shape, dtype=torch.float64, generator=generator) - 0.2)

        self.policy, self.functions = policy, functions
        self.attention_norm, self.ffn_norm = weight(D), weight(D)
        self.qkv, self.output = weight((H + 2 * G) * E, D), weight(D, H * E)
        self.gate_up, self.down = weight(2 * FF, D), weight(D, FF)

    def forward(self, x_bsd: Tensor, shared: Shared) -> Tensor:
        return self.policy.run(self._forward, x_bsd, shared)

    def _forward(self, x_bsd: Tensor, shared: Shared) -> Tensor:
        do, cheap = self.functions, self.policy.cheap
        normed_bsd = cheap(do["rms_norm"], x_bsd, self.attention_norm, 1e-5)
        q, k, v = cheap(do["split_and_turn"], do["linear"](normed_bsd, self.qkv), *shared.turn)
        update_bsd = do["linear"](do["attend"](q, k, v), self.output)
        x_bsd, normed_bsd = cheap(do["add_rms_norm"], x_bsd, update_bsd, self.ffn_norm, 1e-5)
        hidden_bsf = cheap(do["swiglu"], do["linear"](normed_bsd, self.gate_up))
        return x_bsd + do["linear"](hidden_bsf, self.down)


class Stack:
    """Blocks with their policies, always with the same weights and inputs."""

    def __init__(
        self,
        recompute: Recompute,
        offload: bool,
        layers: range = range(5),
        functions: dict[str, Callable[..., Any]] = FUNCTIONS,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.calls: Counter[str] = Counter()
        self.references: list[StorageReference] = []
        counted = {name: self._counted(name, function) for name, function in functions.items()}
        policies = activation_policies(recompute, layers if offload else (), layers)
        self.blocks = nn.ModuleList(Block(policy, counted, generator) for policy in policies)
        inputs = torch.rand(3, B, S, D, dtype=torch.float64, generator=generator)
        self.inputs = [x.clone().requires_grad_() for x in inputs]

    def forward(self, microbatch: int = 0) -> Tensor:
        """The loss. `references` then has the memory of each product's output, in order."""
        x_bsd, shared = self.inputs[microbatch], Shared(self.inputs[microbatch])
        for block in self.blocks:
            x_bsd = block(x_bsd, shared)
        return x_bsd.square().sum()

    def gradients(self) -> dict[str, Tensor]:
        """Of the parameters and of the inputs."""
        inputs = {f"input {number}": x.grad for number, x in enumerate(self.inputs) if x.grad is not None}
        return inputs | {name: p.grad for name, p in self.blocks.named_parameters() if p.grad is not None}

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            result = function(*args)
            if name == "linear":
                self.references.append(storage_reference(result))
            return result

        return call


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-13) -> None:
    """Each to a relative error of `tolerance`: the gradients of several uses of an input are added in any order."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm() / gradient.norm()
        assert error <= tolerance, f"{name}: {error:.1e}"
