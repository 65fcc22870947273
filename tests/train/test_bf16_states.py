"""A run that keeps everything in bf16: weights, moments and gradients, half of the bytes of fp32."""

from __future__ import annotations

import pytest
import torch

from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.load import read_full
from fivefold.optim.optimizer import ShardedOptimizer

FLAGS = ("--precision.compute", "bf16", "--precision.master", "bf16", "--precision.reduce", "bf16")


@pytest.mark.parametrize("moments", ["bf16", "auto"])
def test_weights_moments_and_gradients_are_bf16_and_the_loss_falls(trainer, monkeypatch, moments):
    formats = set()
    real = ShardedOptimizer.step

    def step(self, gradients, *rest):
        formats.update(gradient.dtype for gradient in gradients)
        real(self, gradients, *rest)

    monkeypatch.setattr(ShardedOptimizer, "step", step)
    trainer.train(*FLAGS, "--precision.moments", moments, "--steps", "30", "--optim.lr", "1e-2")
    assert formats == {torch.bfloat16}
    kept = {name: tensor for name, tensor in read_full(open_checkpoint(trainer.out / "small")) if tensor.ndim}
    assert all(
        any(name.startswith(kind) for name in kept) for kind in ("model.", "optim.exp_avg.", "optim.exp_avg_sq.")
    )
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    losses = [line["loss"] for line in trainer.metrics() if "loss" in line]
    assert losses[-1] < losses[0] - 1
