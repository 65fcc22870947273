"""The peak rate by which a step's utilization is told: the catalogue's, of the GPU that runs and the format it uses."""

from __future__ import annotations

import pytest
import torch

from fivefold.train.meter import peak_flops


@pytest.mark.parametrize(
    ("driver", "compute", "peak"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H200", "fp16", 989e12),
        ("NVIDIA H200", "fp32", None),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA Q1 Ultra", "bf16", None),
    ],
)
def test_the_peak_is_that_of_the_gpu_and_the_format(
    monkeypatch: pytest.MonkeyPatch, driver: str, compute: str, peak: float | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: driver)
    assert peak_flops(torch.device("cuda", 0), compute) == peak


def test_a_cpu_has_none() -> None:
    assert peak_flops(torch.device("cpu"), "bf16") is None
