"""How a pointwise operation becomes one GPU kernel: the plain function, compiled by torch where it meets a CUDA tensor.

On a CPU the function runs as it is written: it is the reference, and there may be no C++ compiler to compile with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def compiled_on_cuda(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, compiled on its first call whose first argument is a CUDA tensor; `.__wrapped__` is the plain one.

    Sizes are torch's automatic kind: the first shape gets a kernel of its own, the second makes the sizes that changed
    symbolic. So training runs on static kernels, and any number of other sequence lengths (validation's last batch,
    generation) costs one more compilation and not one each. Weights stay static, so a norm's width is never symbolic.
    """

    @functools.cache
    def compiled() -> Callable[P, R]:
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        on_cuda = isinstance(first, torch.Tensor) and first.is_cuda
        return compiled()(*args, **kwargs) if on_cuda else function(*args, **kwargs)

    return call
