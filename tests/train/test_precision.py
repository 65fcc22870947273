"""The formats of a run that computes in bf16: what is kept and summed in fp32 all the same."""

import pytest
import torch

from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.load import read_full
from fivefold.optim.optimizer import ShardedOptimizer

SHORT = ("--precision.compute", "bf16", "--steps", "2", "--validate.every", "null")


def fits_bf16(tensor):
    return torch.equal(tensor, tensor.bfloat16().to(tensor.dtype))


def test_weights_and_moments_are_kept_in_fp32(trainer):
    """Weights kept in bf16 train almost alike at first: an update below 1/256 of a weight is lost."""
    trainer.train(*SHORT)
    stored = dict(read_full(open_checkpoint(trainer.out / "small")))
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert not any(fits_bf16(tensor) for tensor in stored.values() if tensor.ndim == 2)


@pytest.mark.parametrize(("reduce", "rounded"), [("auto", False), ("bf16", True)])
def test_gradients_of_four_microbatches_add_up_in_fp32_unless_bf16_is_asked_for(trainer, monkeypatch, reduce, rounded):
    seen = []
    real = ShardedOptimizer.gradients

    def gradients(self):
        seen.append([gradient.clone() for gradient in real(self)])
        return real(self)

    monkeypatch.setattr(ShardedOptimizer, "gradients", gradients)
    trainer.train(*SHORT, "--precision.reduce", reduce)
    matrices = [gradient for gradient in seen[0] if gradient.ndim == 2]
    assert {fits_bf16(gradient) for gradient in matrices} == {rounded}
