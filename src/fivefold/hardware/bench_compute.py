"""Timing what one accelerator does alone: matrix products, causal attention, copies. Imports torch.

The shapes are those of models: a large square, the products of a layer of 4,096 and of 8,192 channels on 8,192 tokens,
their weight gradients, the slices of tensor parallelism, and skinny ones that show what a small product loses.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fivefold.hardware.accelerator import Product
from fivefold.hardware.stopwatch import Stopwatch

Shape = tuple[int, int, int]  # m, n, k

GPU_SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (8192, 6144, 4096),  # queries, keys, values of a layer with 4,096 channels
    (8192, 4096, 4096),
    (8192, 28672, 4096),
    (8192, 4096, 14336),
    (28672, 4096, 8192),  # a weight's gradient
    (8192, 128256, 4096),  # the output head
    (8192, 10240, 8192),
    (8192, 8192, 28672),
    (8192, 3584, 4096),  # an eighth of an up-projection
    (8192, 4096, 1792),
    (1024, 4096, 4096),
    (128, 8192, 8192),
    (8192, 8192, 128),
)
GPU_FP8_SHAPES = (GPU_SHAPES[0], GPU_SHAPES[2], GPU_SHAPES[4], GPU_SHAPES[5], GPU_SHAPES[9])
CPU_SHAPES: tuple[Shape, ...] = ((256, 256, 256), (512, 512, 512), (256, 768, 256), (32, 512, 512))
CPU_BF16_SHAPES: tuple[Shape, ...] = ((128, 128, 128),)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FP8_FROM = (8, 9)
"""The first compute capability of NVIDIA's whose tensor cores multiply in fp8; AMD's fp8 is another one."""

ATTENTION_ON_GPU, ATTENTION_ON_CPU = (1, 32, 8192, 128), (1, 2, 256, 32)
"""Sequences, heads, tokens, channels of a head."""
BACKENDS = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)
"""The fastest first; the first that runs is timed."""
COPY_BYTES_ON_GPU, COPY_BYTES_ON_CPU = 2**30, 2**24
HOST_BYTES = 2**28


def formats_of(device: torch.device) -> list[str]:
    """Formats of products that the device has, the one for training first."""
    if device.type != "cuda":
        return ["fp32", "bf16"]
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    formats = ["bf16" if native else "fp16", "fp32"]
    fp8 = torch.version.hip is None and torch.cuda.get_device_capability(device) >= FP8_FROM
    return [*formats, "fp8"] if fp8 else formats


def products(watch: Stopwatch) -> list[Product]:
    """The rate of matrix products on random numbers, in each format that the device has."""
    return [
        Product(format, m, n, k, 2 * m * n * k / watch.seconds(_product(format, (m, n, k), watch.device)))
        for format in formats_of(watch.device)
        for m, n, k in _shapes(format, watch.device)
    ]


def _shapes(format: str, device: torch.device) -> Iterator[Shape]:
    """Those that are timed in a format, and fit."""
    if device.type != "cuda":
        yield from CPU_SHAPES if format == "fp32" else CPU_BF16_SHAPES
        return
    free, _ = torch.cuda.mem_get_info(device)
    shapes = {"fp8": GPU_FP8_SHAPES, "fp32": GPU_SHAPES[1:2]}.get(format, GPU_SHAPES)
    yield from (shape for shape in shapes if 4 * _elements(shape) < free / 2)


def _elements(shape: Shape) -> int:
    m, n, k = shape
    return m * n + m * k + n * k


def _product(format: str, shape: Shape, device: torch.device) -> Callable[[], Tensor]:
    m, n, k = shape
    dtype = DTYPES.get(format, torch.float32)
    left = torch.randn(m, k, device=device)
    right = torch.randn(n, k, device=device)  # as a linear layer keeps its weight
    if format == "fp8":
        return _fp8_product(left, right)
    a, b = left.to(dtype), right.to(dtype).t()
    out = torch.empty(m, n, device=device, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _fp8_product(left: Tensor, right: Tensor) -> Callable[[], Tensor]:
    """With one scale for each matrix and fast accumulation, the fastest there is."""
    a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=left.device)
    whole = F.ScalingType.TensorWise
    return lambda: F.scaled_mm(a, b, one, whole, one, whole, output_dtype=torch.bfloat16, use_fast_accum=True)


def attention(watch: Stopwatch) -> tuple[dict[str, float], str]:
    """FLOP/s of causal attention forward and backward in the format for training, the masked half not counted, and the
    backend that ran."""
    gpu = watch.device.type == "cuda"
    shape = ATTENTION_ON_GPU if gpu else ATTENTION_ON_CPU
    dtype = DTYPES[formats_of(watch.device)[0]]
    q, k, v = (torch.randn(shape, device=watch.device, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn(shape, device=watch.device, dtype=dtype)
    backend = _first_that_runs(q, k, v, BACKENDS if gpu else BACKENDS[1:])

    with sdpa_kernel(backend):
        forward = watch.seconds(
            lambda: F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), is_causal=True)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        backward = watch.seconds(lambda: torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True))
    sequences, heads, tokens, channels = shape
    work = 2 * sequences * heads * tokens * tokens * channels  # two products, half of each
    return {"forward": work / forward, "backward": 2.5 * work / backward}, backend.name.lower().removesuffix(
        "_attention"
    )


def _first_that_runs(q: Tensor, k: Tensor, v: Tensor, backends: tuple[SDPBackend, ...]) -> SDPBackend:
    for backend in backends:
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each backend that cannot run says why
            try:
                F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
            except RuntimeError:
                continue
        return backend
    return SDPBackend.MATH


def copy(watch: Stopwatch) -> float:
    """bytes/s of a copy inside the memory: read and written are both counted."""
    wanted = COPY_BYTES_ON_CPU
    if watch.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(watch.device)
        wanted = min(COPY_BYTES_ON_GPU, 2 ** int(math.log2(free / 4)))
    source = torch.randint(0, 255, (wanted,), dtype=torch.uint8, device=watch.device)
    target = torch.empty_like(source)
    return 2 * wanted / watch.seconds(lambda: target.copy_(source))


def host_copies(watch: Stopwatch) -> dict[str, float]:
    """bytes/s to a GPU from pinned CPU memory, and from it; nothing on a CPU."""
    if watch.device.type != "cuda":
        return {}
    outside = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    inside = torch.empty(HOST_BYTES, dtype=torch.uint8, device=watch.device)
    return {
        "to": HOST_BYTES / watch.seconds(lambda: inside.copy_(outside, non_blocking=True)),
        "from": HOST_BYTES / watch.seconds(lambda: outside.copy_(inside, non_blocking=True)),
    }
