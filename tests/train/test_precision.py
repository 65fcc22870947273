"""The formats of a run that computes in bf16: what is kept and summed in fp32 all the same."""

import pytest
import torch

from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.load import read_full
from fivefold.optim.optimizer import ShardedOptimizer
from fivefold.parallel.accumulation import Accumulation

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


def test_one_microbatch_a_step_drops_each_units_gathered_weights_where_its_backward_ends(trainer, monkeypatch):
    """They all stayed to the step's end: 6.4 GiB more at the peak of a model of 4.4B parameters on one GPU."""
    told = []
    real = Accumulation.expect
    monkeypatch.setattr(Accumulation, "expect", lambda self, last: (told.append(last), real(self, last)))
    trainer.train(*SHORT, "--batch.micro_size", "8")
    assert told == [True, True]
    assert all(line["grad_norm"] > 0 for line in trainer.metrics())
