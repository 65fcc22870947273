"""The gated activation as two Triton kernels, for CUDA; imported when the first CUDA tensor comes.

What torch.compile makes of alternate columns reads every other element and moves 2.1 TB/s on an H200; read in pairs
and split in registers they move twice as much.
"""

# n values of the output

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up for (..., 2 f) with gate and up in alternate columns, computed in fp32: (..., f)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        _forward[(triton.cdiv(out.numel(), BLOCK),)](gate_up, out, out.numel(), BLOCK)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        d_gate_up = torch.empty_like(gate_up)
        _backward[(triton.cdiv(d_out.numel(), BLOCK),)](gate_up, d_out.contiguous(), d_gate_up, d_out.numel(), BLOCK)
        return d_gate_up


@triton.jit
def _forward(gate_up, out, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pairs = 2 * place[:, None] + tl.arange(0, 2)[None, :]
    gate, up = tl.split(tl.load(gate_up + pairs, mask=place[:, None] < n, other=0.0).to(tl.float32))
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + place, value.to(out.dtype.element_ty), mask=place < n)


@triton.jit
def _backward(gate_up, d_out, d_gate_up, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pairs = 2 * place[:, None] + tl.arange(0, 2)[None, :]
    gate, up = tl.split(tl.load(gate_up + pairs, mask=place[:, None] < n, other=0.0).to(tl.float32))
    d = tl.load(d_out + place, mask=place < n, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate = d * up * share * (1 + gate * (1 - share))
    d_pairs = tl.join(d_gate, d * gate * share)
    tl.store(d_gate_up + pairs, d_pairs.to(d_gate_up.dtype.element_ty), mask=place[:, None] < n)
