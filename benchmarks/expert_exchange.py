"""What sending tokens to experts costs, on one GPU: `python benchmarks/expert_exchange.py [--blocks N]`.

One rank of several is here, and each other rank is its mirror image: it sends what this one sends. Copies inside the
memory stand in the place of transfers, so that what is measured is all the rest: sorting, waiting for the host, moving
rows, and grouped products with fewer experts. With `--blocks` what comes from others is copied by so many blocks of the
GPU beside the computation, as a link with NCCL's kernels would bring it; how fast that is, is printed. Layers are as
wide as those of `moe6.yaml`, behind two products that take about as long as attention; the table has milliseconds of
all layers' forward and backward, the bytes that would leave a rank in them, and the allocator's peak over what was
there before.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fivefold.kernels.expert_feed_forward import expert_feed_forward
from fivefold.kernels.routing import sort_by_expert
from fivefold.parallel.axis import Axis, Pending
from fivefold.parallel.expert import through_experts

TOKENS, CHOICES, EXPERTS, WIDTH, EXPERT_WIDTH, DENSE_WIDTH = 8192, 8, 128, 2048, 768, 32768
WARM_UP = 3


@triton.jit
def copy(source, target, n, BLOCK: tl.constexpr):
    """`n` elements, by however many programs there are."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < n:
        place = first + tl.arange(0, BLOCK)
        tl.store(target + place, tl.load(source + place, mask=place < n), mask=place < n)
        first += tl.num_programs(0).to(tl.int64) * BLOCK


class Link:
    """Copies with a part of the GPU, beside what is computed."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.stream = blocks, torch.cuda.Stream(priority=-1)

    def bring(self, source: Tensor, target: Tensor) -> None:
        """Fill `target` from the first elements of `source`, as far as there are any."""
        n = min(source.numel(), target.numel())
        if not self.blocks:
            target.flatten()[:n].copy_(source.flatten()[:n])
        elif n:
            copy[(self.blocks,)](source, target, n, 4096, num_warps=16)

    def rate(self) -> float:
        """GB/s of a large copy."""
        source = torch.empty(2**26, dtype=torch.bfloat16, device="cuda").normal_()
        target, marks = torch.empty_like(source), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for mark in marks:
            self.bring(source, target)
            mark.record()
        torch.cuda.synchronize()
        return source.nbytes / marks[0].elapsed_time(marks[1]) / 1e6


@dataclass(frozen=True)
class Arriving:
    """A transfer that is over at some point of the device's work."""

    end: torch.cuda.Event

    def wait(self) -> None:
        """Let what is queued from now on wait for it."""
        torch.cuda.current_stream().wait_event(self.end)


@dataclass(frozen=True)
class Mirrors(Axis):
    """An axis on which every rank does what rank 0 does."""

    link: Link = field(kw_only=True)
    moved: list[int] = field(default_factory=list, compare=False)
    """Bytes that would have left the rank, by transfer."""

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        self.moved.append(sum(send[1:]) * x[:1].numel() * x.element_size())
        x, out = x.contiguous(), x.new_empty((sum(receive), *x.shape[1:]))
        self.link.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.link.stream):
            for rank, part in enumerate(out.split(list(receive))):
                self.link.bring(x, part) if rank else part[: len(x)].copy_(x[: len(part)])
            end = self.link.stream.record_event()
        for each in (x, out):
            each.record_stream(self.link.stream)
        return Pending(out, [Arriving(end)], x)

    def start_gather(self, x: Tensor) -> Pending:
        return Pending(x.repeat(self.size, *[1] * (x.ndim - 1)), [], x)


def measure(sizes: Sequence[int], link: Link, layers: int, steps: int) -> tuple[float, float, float, float]:
    """Forward and backward in ms, GB that leave the rank, and GiB, with the experts spread over axes of such sizes."""
    legs = [Mirrors(size, link=link) for size in sizes]
    ranks = prod(sizes)
    generator = torch.Generator("cuda").manual_seed(0)

    def weight(*shape: int) -> Tensor:
        drawn = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        return (drawn * shape[-1] ** -0.5).requires_grad_()

    x0_td = (weight(TOKENS, WIDTH) * WIDTH**0.5).detach().requires_grad_()
    up, down, router = weight(DENSE_WIDTH, WIDTH), weight(WIDTH, DENSE_WIDTH), weight(EXPERTS, WIDTH)
    gate_up = weight(EXPERTS // ranks, 2 * EXPERT_WIDTH, WIDTH)
    out = weight(EXPERTS // ranks, WIDTH, EXPERT_WIDTH)
    weights = (x0_td, up, down, router, gate_up, out)

    def layer(x_td: Tensor) -> Tensor:
        x_td = x_td + F.rms_norm(F.linear(F.linear(x_td, up), down), (WIDTH,))
        normed_td = F.rms_norm(x_td, (WIDTH,))
        best = F.linear(normed_td, router).float().softmax(-1).topk(CHOICES, -1)
        gates_tk = best.values / best.values.sum(-1, keepdim=True)

        def compute(*inputs: Any) -> Tensor:
            return expert_feed_forward(*inputs, gate_up, out)

        return x_td + through_experts(normed_td, gates_tk, sort_by_expert(best.indices, EXPERTS), legs, compute)

    times, before = [], torch.cuda.memory_allocated()
    for _ in range(WARM_UP + steps):
        for each in weights:
            each.grad = None
        for leg in legs:
            leg.moved.clear()
        torch.cuda.reset_peak_memory_stats()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        marks[0].record()
        x_td = x0_td
        for _ in range(layers):
            x_td = layer(x_td)
        marks[1].record()
        x_td.backward(torch.ones_like(x_td))
        marks[2].record()
        torch.cuda.synchronize()
        times.append([marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])])
    forward, backward = (statistics.median(each) for each in zip(*times[WARM_UP:], strict=True))
    moved = sum(sum(leg.moved) for leg in legs) / 1e9
    return forward, backward, moved, (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=0)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    link = Link(arguments.blocks)
    print(f"what comes from others is copied at {link.rate():,.0f} GB/s\n", flush=True)
    print("| ep | forward, ms | backward, ms | GB sent | peak GiB |\n|---|---|---|---|---|", flush=True)
    for sizes in ((), (2,), (8,), (2, 4), (64,), (8, 8)):
        forward, backward, moved, gib = measure(sizes, link, arguments.layers, arguments.steps)
        name = " x ".join(map(str, sizes)) or "1"
        print(f"| {name} | {forward:.1f} | {backward:.1f} | {moved:.2f} | {gib:.2f} |", flush=True)


if __name__ == "__main__":
    main()
