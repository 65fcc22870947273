"""Where Triton kernels run: on a GPU, and with TRITON_INTERPRET=1 on a CPU too, which takes fp32 alone."""

import os

import pytest
import torch

INTERPRETED = ["cpu"] if os.environ.get("TRITON_INTERPRET") == "1" else []
DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), *INTERPRETED]
FORMATS = [
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *((device, torch.float32) for device in INTERPRETED),
]
"""Device and format."""
