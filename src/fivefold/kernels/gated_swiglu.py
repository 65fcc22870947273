"""The activation of the experts: SwiGLU (Shazeer 2020), and each row weighted with the gate that its router gave it.

The router's gate is applied here, in front of the down-projection, because a product is linear in its rows: nothing of
the down-projection is then needed for the gate's gradient. The output is not kept for backward either, which computes
it again beside the gradients. Columns alternate as in `swiglu`.
"""

# r rows  f width of an expert

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gated_swiglu(gate_up_r2f: Tensor, gates_r: Tensor) -> Tensor:
    """silu(gate) * up * gates[r], with gate and up in alternate columns: (r, f), rounded once. No gradient.

    Gates are fp32, or fp64.
    """
    if gate_up_r2f.is_cuda and gate_up_r2f.dtype != torch.float64:
        from fivefold.kernels import gated_swiglu_triton

        return gated_swiglu_triton.gated_swiglu(gate_up_r2f.detach(), gates_r.detach())
    return reference(gate_up_r2f.detach(), gates_r.detach())


def gated_swiglu_backward(gate_up_r2f: Tensor, gates_r: Tensor, d_out_rf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of both arguments in their formats, and the output once more: (r, 2 f), (r,), (r, f)."""
    if gate_up_r2f.is_cuda and gate_up_r2f.dtype != torch.float64:
        from fivefold.kernels import gated_swiglu_triton

        return gated_swiglu_triton.gated_swiglu_backward(gate_up_r2f.detach(), gates_r.detach(), d_out_rf)
    return reference_backward(gate_up_r2f.detach(), gates_r.detach(), d_out_rf)


def reference(gate_up_r2f: Tensor, gates_r: Tensor) -> Tensor:
    """As `gated_swiglu`."""
    gate, up = _parts(gate_up_r2f)
    return (F.silu(gate) * up * gates_r[:, None]).to(gate_up_r2f.dtype)


def reference_backward(gate_up_r2f: Tensor, gates_r: Tensor, d_out_rf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `gated_swiglu_backward`."""
    gate, up = _parts(gate_up_r2f)
    share, d_out = torch.sigmoid(gate), d_out_rf.to(gate.dtype)
    silu = gate * share
    plain = silu * up
    d_plain = d_out * gates_r[:, None]
    d_gate = d_plain * up * share * (1 + gate * (1 - share))
    d_gate_up = torch.stack([d_gate, d_plain * silu], dim=-1).flatten(-2)
    out = plain * gates_r[:, None]
    d_gates = (d_out * plain).sum(-1)
    return d_gate_up.to(gate_up_r2f.dtype), d_gates.to(gates_r.dtype), out.to(gate_up_r2f.dtype)


def _parts(gate_up_r2f: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up in at least fp32, each in memory of its own: on a CPU functions of every other element are slow."""
    wide = gate_up_r2f.to(torch.promote_types(gate_up_r2f.dtype, torch.float32))
    gate, up = (part.contiguous() for part in wide.unflatten(-1, (-1, 2)).unbind(-1))
    return gate, up
