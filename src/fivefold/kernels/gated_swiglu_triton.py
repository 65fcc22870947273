"""The activation of the experts as two Triton kernels, for CUDA; imported when the first CUDA tensor comes.

A pair of gate and up is read as one word of twice the width and split by shifts: split as a tensor it would go through
shared memory. Backward goes through whole rows, because the gradient of a row's gate is a sum over it, and writes the
output again while it has all that this needs.
"""

# r rows  f width of an expert

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 512
"""Elements of the output that a program makes at once: four a thread, so that all tensors are laid out alike."""
WORDS = {2: torch.int32, 4: torch.int64}
"""What holds two numbers of so many bytes each."""


def gated_swiglu(gate_up_r2f: Tensor, gates_r: Tensor) -> Tensor:
    """silu(gate) * up * gates[r], computed in fp32: (r, f)."""
    gate_up_r2f, gates_r = gate_up_r2f.contiguous(), gates_r.contiguous()
    r, f = len(gate_up_r2f), gate_up_r2f.shape[1] // 2
    out_rf = gate_up_r2f.new_empty(r, f)
    if r:
        rows, columns = tile(f)
        _forward[(triton.cdiv(r, rows), triton.cdiv(f, columns))](
            words(gate_up_r2f), gates_r, out_rf, r, f, rows, columns
        )
    return out_rf


def gated_swiglu_backward(gate_up_r2f: Tensor, gates_r: Tensor, d_out_rf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of both arguments, and the output once more, computed in fp32: (r, 2 f), (r,), (r, f)."""
    gate_up_r2f, gates_r, d_out_rf = gate_up_r2f.contiguous(), gates_r.contiguous(), d_out_rf.contiguous()
    r, f = d_out_rf.shape
    d_gate_up_r2f, d_gates_r = torch.empty_like(gate_up_r2f), torch.empty_like(gates_r)
    out_rf = gate_up_r2f.new_empty(r, f)
    if r:
        rows, columns = tile(f)
        _backward[(triton.cdiv(r, rows),)](
            words(gate_up_r2f), gates_r, d_out_rf, words(d_gate_up_r2f), d_gates_r, out_rf, r, f, rows, columns
        )
    return d_gate_up_r2f, d_gates_r, out_rf


def words(pairs_r2f: Tensor) -> Tensor:
    """The same memory as one word a pair, (r, f)."""
    return pairs_r2f.view(WORDS[pairs_r2f.element_size()])


def tile(f: int) -> tuple[int, int]:
    """Rows and columns of the output that a program makes at once: as many rows as warps, of which each sums one."""
    columns = min(triton.next_power_of_2(f), 128)
    return TILE // columns, columns


@triton.jit
def _forward(gate_up, gates, out, r, f, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < r)[:, None] & (column < f)[None, :]
    place = row[:, None] * f + column[None, :]
    gate, up = _split(tl.load(gate_up + place, mask=inside, other=0), out.dtype.element_ty)
    scale = tl.load(gates + row, mask=row < r, other=0.0)[:, None]
    value = gate * tl.sigmoid(gate) * up * scale
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gate_up, gates, d_out, d_gate_up, d_gates, out, r, f, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    scale = tl.load(gates + row, mask=row < r, other=0.0)[:, None]
    d_scale = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, f, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < r)[:, None] & (column < f)[None, :]
        place = row[:, None] * f + column[None, :]
        gate, up = _split(tl.load(gate_up + place, mask=inside, other=0), out.dtype.element_ty)
        d = tl.load(d_out + place, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(gate)
        silu = gate * share
        d_scale += d * silu * up
        d_plain = d * scale
        d_gate = d_plain * up * share * (1 + gate * (1 - share))
        tl.store(d_gate_up + place, _join(d_gate, d_plain * silu, out.dtype.element_ty), mask=inside)
        tl.store(out + place, (silu * up * scale).to(out.dtype.element_ty), mask=inside)
    tl.store(d_gates + row, tl.sum(d_scale, axis=1), mask=row < r)


@triton.jit
def _split(word, FORMAT: tl.constexpr):
    """The two numbers of a word, in fp32; the first lies in the lower half."""
    BITS: tl.constexpr = FORMAT.primitive_bitwidth
    HALF: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint32
    first = word.to(HALF).to(FORMAT, bitcast=True)
    second = (word >> BITS).to(HALF).to(FORMAT, bitcast=True)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _join(first, second, FORMAT: tl.constexpr):
    """Two numbers, rounded, as a word."""
    BITS: tl.constexpr = FORMAT.primitive_bitwidth
    HALF: tl.constexpr = tl.uint16 if BITS == 16 else tl.uint32
    WORD: tl.constexpr = tl.uint32 if BITS == 16 else tl.uint64
    lower = first.to(FORMAT).to(HALF, bitcast=True).to(WORD)
    return (second.to(FORMAT).to(HALF, bitcast=True).to(WORD) << BITS) | lower
