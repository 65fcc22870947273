"""Times each kernel of Fivefold on one GPU and prints a JSON line each: attention, the vocabulary loss, pointwise work,
what experts add, and the optimizer.

python benchmarks/kernels.py        # minutes on a GPU, compilation included; without one: tiny sizes

FLOPs of attention are those of the documents' own causal work, backward 2.5 x forward. Bytes of a pointwise operation
are its inputs and outputs once, to be compared with the device copy's. A variant that a torch version or a device does
not have is a line with an `error`.
"""

# b sequences  s positions  h query heads  g key/value heads  e head size  d model width  v vocabulary
# Of experts: r rows, one for each choice of a token  n tokens  k choices of a token  f width of an expert

from __future__ import annotations

import inspect
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.kernels.adamw import adamw_
from fivefold.kernels.alibi import alibi_slopes
from fivefold.kernels.attention import attend, attention_mask
from fivefold.kernels.cross_entropy import IGNORE, linear_cross_entropy
from fivefold.kernels.gated_swiglu import gated_swiglu, gated_swiglu_backward
from fivefold.kernels.grouped import (
    add_grouped_weight_gradient,
    grouped_multiply,
    grouped_multiply_transposed,
    grouped_weight_gradient,
)
from fivefold.kernels.layer_norm import add_layer_norm
from fivefold.kernels.permute import gather_rows, sum_rows
from fivefold.kernels.rms_norm import add_rms_norm, rms_norm
from fivefold.kernels.rotary import rotate, rotation
from fivefold.kernels.swiglu import swiglu


@dataclass(frozen=True)
class Sizes:
    """What is timed; the GPU's are those of an 8B Llama on one sequence, and the experts of Qwen3-30B-A3B."""

    tokens: int = 8192
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    hidden: int = 4096
    ffn: int = 14336
    vocab: int = 128256
    documents: tuple[int, ...] = (1, 4, 8, 32)
    chunks: tuple[int, ...] = (512, 1024, 2048, 4096, 8192)
    experts: int = 128
    top_k: int = 8
    expert_hidden: int = 2048
    expert_ffn: int = 768
    updated: int = 2**29
    copy_bytes: int = 2**32
    repeats: int = 20


TINY = Sizes(
    tokens=64, heads=4, kv_heads=2, head_size=16, hidden=32, ffn=48, vocab=200, documents=(1, 4), chunks=(16, 64),
    experts=6, top_k=2, expert_hidden=32, expert_ffn=24, updated=2**12, copy_bytes=2**16, repeats=2,
)  # fmt: skip


def main() -> None:
    """Run everything on the GPU, or in tiny on the CPU."""
    on_gpu = torch.cuda.is_available()
    device, sizes = torch.device("cuda" if on_gpu else "cpu"), Sizes() if on_gpu else TINY
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    show(benchmark="environment", device=name, torch=torch.__version__, sizes=sizes.__dict__)
    time_pointwise(device, sizes)
    time_rows(device, sizes)
    time_grouped(device, sizes)
    time_update(device, sizes)
    time_attention(device, sizes)
    time_loss(device, sizes)


def time_attention(device: torch.device, sizes: Sizes) -> None:
    """Our choice of kernel for 1, 4, ... documents in a window, and with ALiBi, beside torch's varlen_attn."""
    t, slopes = sizes.tokens, alibi_slopes(sizes.heads)
    q, k, v = (random(device, 1, t, n, sizes.head_size) for n in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
    gradient = torch.randn_like(q)

    def both(kernel: str, documents: int, run: Callable[[], Tensor]) -> None:
        flops = 2 * sizes.heads * sizes.head_size * t**2 // documents
        case = {"benchmark": "attention", "kernel": kernel, "documents": documents}
        measure(case, run, (q, k, v), (gradient,), sizes, flops=(flops, 2.5 * flops))

    causal = attention_mask(q.flatten(2), None, None)
    both("causal over the window", 1, lambda: attend(q, k, v, causal))
    for documents in sizes.documents:
        documents_bs = torch.arange(t, device=device, dtype=torch.int32)[None] // (t // documents)
        packed = attention_mask(q.flatten(2), documents_bs, None)
        both("packed", documents, lambda packed=packed: attend(q, k, v, packed))
        both("varlen_attn", documents, lambda documents=documents: varlen(q, k, v, documents))
        make = lambda documents_bs=documents_bs: attention_mask(q.flatten(2), documents_bs, None)  # noqa: E731
        show(benchmark="attention mask", documents=documents, ms=median_ms(make, device, sizes.repeats))
    alibi = attention_mask(q.flatten(2), None, slopes)
    both("alibi", 1, lambda: attend(q, k, v, alibi))


def varlen(q: Tensor, k: Tensor, v: Tensor, documents: int) -> Tensor:
    """torch's variable-length attention over equal documents; how causality is asked for depends on torch's version."""
    from torch.nn.attention.varlen import varlen_attn

    length = q.shape[1] // documents
    ends = torch.arange(documents + 1, device=q.device, dtype=torch.int32) * length
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    else:
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    return varlen_attn(q[0], k[0], v[0], ends, ends, length, length, **options)[None]


def time_loss(device: torch.device, sizes: Sizes) -> None:
    """The projection to the vocabulary and its loss, whole and in chunks: forward and backward together, and memory."""
    hidden, weight = random(device, sizes.tokens, sizes.hidden), random(device, sizes.vocab, sizes.hidden)
    labels = torch.randint(0, sizes.vocab, (sizes.tokens,), device=device)
    flops = 6 * sizes.tokens * sizes.hidden * sizes.vocab

    def once(loss: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(), (hidden, weight))

    def plain() -> Tensor:
        return F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=IGNORE, reduction="sum")

    cases: list[tuple[int | str, Callable[[], Tensor]]] = [("all logits in fp32", plain)]
    cases += [(c, lambda c=c: linear_cross_entropy(hidden, weight, labels, c)) for c in sizes.chunks]
    for chunk, loss in cases:
        torch.compiler.reset()  # each chunk size gets static kernels, as in training

        def line(chunk: int | str = chunk, loss: Callable[[], Tensor] = loss) -> dict[str, Any]:
            ms = median_ms(once(loss), device, sizes.repeats // 2)
            return {
                "chunk": chunk,
                "ms": ms,
                "tflops": flops / ms / 1e9,
                "extra_gib": extra_gib(once(loss), device),
            }

        guarded({"benchmark": "loss"}, line)


def time_copy(device: torch.device, sizes: Sizes) -> None:
    """The speed that pointwise work cannot exceed."""
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source), device, sizes.repeats)
    show(benchmark="copy", ms=ms, gb_s=2 * sizes.copy_bytes / ms / 1e6)


def time_pointwise(device: torch.device, sizes: Sizes) -> None:
    """Norms, SwiGLU and rotary, compiled and as written, against the speed of a copy."""
    time_copy(device, sizes)
    x, update = random(device, sizes.tokens, sizes.hidden), random(device, sizes.tokens, sizes.hidden)
    weight, bias = random(device, sizes.hidden), random(device, sizes.hidden)
    gate_up = random(device, sizes.tokens, 2 * sizes.ffn)
    q, k = (random(device, 1, sizes.tokens, n, sizes.head_size) for n in (sizes.heads, sizes.kv_heads))
    frequencies = 10000.0 ** -torch.linspace(0, 1, sizes.head_size // 2, device=device)
    cos, sin = rotation(torch.arange(sizes.tokens, device=device), frequencies)

    # operation, its arguments, how many of them get a gradient, tensors read and written in forward and in backward
    cases: list[tuple[Callable[..., Any], tuple[Any, ...], int, tuple[list[Tensor], list[Tensor]]]] = [
        (rms_norm, (x, weight, 1e-5), 2, ([x, x], [x, x, x])),
        (add_rms_norm, (x, update, weight, 1e-5), 3, ([x] * 4, [x] * 5)),
        (add_layer_norm, (x, update, weight, bias, 1e-5), 4, ([x] * 4, [x] * 5)),
        (swiglu, (gate_up,), 1, ([gate_up, gate_up[:, ::2]], [gate_up, gate_up, gate_up[:, ::2]])),
        (rotate, (q, k, cos, sin), 2, ([q, q, k, k], [q, q, k, k])),
    ]
    for operation, arguments, leaves, traffic in cases:
        sized = tuple(sum(t.numel() * t.element_size() for t in tensors) for tensors in traffic)
        for form, function in (("compiled", operation), ("as written", inspect.unwrap(operation))):
            out = function(*arguments)
            gradients = tuple(torch.randn_like(o) for o in (out if isinstance(out, tuple) else (out,)))
            run = lambda function=function, arguments=arguments: function(*arguments)  # noqa: E731
            case = {"benchmark": operation.__name__, "form": form}
            measure(case, run, arguments[:leaves], gradients, sizes, traffic=sized)


def time_rows(device: torch.device, sizes: Sizes) -> None:
    """Tokens taken to their experts and added up again, and the gated activation between."""
    n, k, d = sizes.tokens, sizes.top_k, sizes.expert_hidden
    order_r = torch.rand(n, sizes.experts, device=device).topk(k).indices.flatten().argsort(stable=True)
    index_r, places_nk = order_r // k, order_r.argsort().view(n, k).int()
    x_nd, rows_rd = (random(device, m, d).detach() for m in (n, n * k))
    gate_up_r2f, out_rf = (random(device, n * k, m * sizes.expert_ffn).detach() for m in (2, 1))
    gates_r = torch.rand(n * k, device=device)
    timed(device, sizes, "gather_rows", lambda: gather_rows(x_nd, index_r), [x_nd, rows_rd])
    timed(device, sizes, "torch's index_select", lambda: x_nd.index_select(0, index_r), [x_nd, rows_rd])
    timed(device, sizes, "sum_rows", lambda: sum_rows(rows_rd, places_nk), [x_nd, rows_rd])
    timed(device, sizes, "gated_swiglu", lambda: gated_swiglu(gate_up_r2f, gates_r), [gate_up_r2f, out_rf])
    backward = lambda: gated_swiglu_backward(gate_up_r2f, gates_r, out_rf)  # noqa: E731
    timed(device, sizes, "gated_swiglu_backward", backward, [gate_up_r2f, gate_up_r2f, out_rf, out_rf])


def time_grouped(device: torch.device, sizes: Sizes) -> None:
    """The products with the experts' gate and up weights, as many FLOPs each, for equal and for Dirichlet(1) loads."""
    experts, r, i, o = sizes.experts, sizes.tokens * sizes.top_k, sizes.expert_hidden, 2 * sizes.expert_ffn
    weight_eoi, x_ri, g_ro = (random(device, *shape).detach() for shape in ((experts, o, i), (r, i), (r, o)))
    total_eoi = torch.zeros(experts, o, i, device=device)
    drawn_e = torch.distributions.Dirichlet(torch.ones(experts)).sample()
    for loads, shares_e in (("balanced", torch.full((experts,), 1 / experts)), ("Dirichlet(1)", drawn_e)):
        ends_e = (shares_e.double().cumsum(0) * r).round().to(device, torch.int32)
        cases: list[tuple[Callable[..., Tensor], tuple[Any, ...]]] = [
            (grouped_multiply, (x_ri, weight_eoi, ends_e)),
            (grouped_multiply_transposed, (g_ro, weight_eoi, ends_e)),
            (grouped_weight_gradient, (g_ro, x_ri, ends_e)),
            (add_grouped_weight_gradient, (total_eoi, g_ro, x_ri, ends_e, torch.float32)),
        ]
        for product, arguments in cases:
            run = lambda product=product, arguments=arguments: product(*arguments)  # noqa: E731
            timed(device, sizes, product.__name__, run, loads=loads, flops=2 * r * i * o)


def time_update(device: torch.device, sizes: Sizes) -> None:
    """AdamW on one fp32 tensor with a divided gradient, ours and torch's, which writes the gradient back."""
    param, grad, exp_avg, exp_avg_sq = (torch.zeros(sizes.updated, device=device) for _ in range(4))
    step, divisor, found_inf = (torch.full((), value, device=device) for value in (1.0, 2.0, 0.0))
    settings: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    numbers = {"divisor": divisor, "found_inf": found_inf}
    run = lambda: adamw_(param, grad, exp_avg, exp_avg_sq, step, **numbers, **settings)  # noqa: E731
    timed(device, sizes, "adamw_", run, [param] * 7)
    theirs: Any = torch.optim.AdamW([torch.nn.Parameter(param)], fused=True, **settings)
    theirs.param_groups[0]["params"][0].grad, theirs.grad_scale, theirs.found_inf = grad, divisor, found_inf
    timed(device, sizes, "torch's fused AdamW", theirs.step, [param] * 7)


def timed(
    device: torch.device,
    sizes: Sizes,
    name: str,
    run: Callable[[], object],
    traffic: Sequence[Tensor] = (),
    flops: float = 0.0,
    **case: Any,
) -> None:
    """One line of what has no gradient: milliseconds, and TFLOP/s, or GB/s of the tensors that it reads and writes."""

    def line() -> dict[str, Any]:
        ms = median_ms(run, device, sizes.repeats, calls=10)
        speed = {"tflops": flops / ms / 1e9} if flops else {"gb_s": sum(t.nbytes for t in traffic) / ms / 1e6}
        return {"ms": ms} | speed

    guarded({"benchmark": name} | case, line)


def measure(
    case: dict[str, Any],
    run: Callable[[], Any],
    leaves: Sequence[Tensor],
    gradients: Sequence[Tensor],
    sizes: Sizes,
    flops: tuple[float, ...] = (),
    traffic: tuple[float, ...] = (),
) -> None:
    """One line: milliseconds of forward and of backward, and what they come to in TFLOP/s or GB/s."""

    def line() -> dict[str, Any]:
        device, out = leaves[0].device, run()
        outs = out if isinstance(out, tuple) else (out,)
        times = [
            median_ms(run, device, sizes.repeats),
            median_ms(lambda: torch.autograd.grad(outs, leaves, gradients, retain_graph=True), device, sizes.repeats),
        ]
        found: dict[str, Any] = {"ms": times}
        if flops:
            found["tflops"] = [f / ms / 1e9 for f, ms in zip(flops, times, strict=True)]
        if traffic:
            found["gb_s"] = [b / ms / 1e6 for b, ms in zip(traffic, times, strict=True)]
        return found

    guarded(case, line)


def guarded(case: dict[str, Any], line: Callable[[], dict[str, Any]]) -> None:
    """Print the case with its numbers, or with the reason why there are none."""
    try:
        show(**case, **line())
    except (RuntimeError, NotImplementedError, TypeError) as error:
        show(**case, error=str(error).split(". ")[0].strip().splitlines()[0])


def median_ms(run: Callable[[], object], device: torch.device, repeats: int, calls: int = 1) -> float:
    """Median time of one call, after three to warm up (the first of them compiles).

    Of several `calls` in a row, the device works on one while the host starts the next.
    """
    for _ in range(3):
        run()
    times = []
    for _ in range(max(1, repeats)):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(device)
        times.append((time.perf_counter() - start) / calls * 1e3)
    return statistics.median(times)


def extra_gib(run: Callable[[], object], device: torch.device) -> float | None:
    """Memory that a call takes at its peak beyond what is there; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def random(device: torch.device, *shape: int) -> Tensor:
    """Normal numbers in bf16 that want a gradient."""
    return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()


def show(**line: Any) -> None:
    """One JSON line, at once; numbers with four digits."""
    print(json.dumps(_rounded(line)), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
