"""A run that keeps things in CPU memory trains to the same bytes, and goes on from a run that does not, and back."""

from __future__ import annotations

import pytest
import torch

from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.load import read_full

SHORT = ("--steps", "6", "--checkpoint.every", "2", "--validate.every", "3")
WHAT = ("step", "tokens", "loss", "grad_norm", "val_loss/held")
KINDS = ("[optimizer]", "[optimizer, parameters]", "[activations]", "[optimizer, parameters, activations]")


@pytest.fixture
def plain(trainer):
    """Losses and validation of a run that keeps everything on its device, and what it saved at the end."""
    trainer.train(*SHORT, "--name", "plain")
    return trainer.metrics("plain"), dict(read_full(open_checkpoint(trainer.out / "plain")))


def assert_same_run(trainer, name, plain) -> None:
    lines, saved = plain
    for found, expected in zip(trainer.metrics(name), lines, strict=True):
        assert {key: found.get(key) for key in WHAT} == {key: expected.get(key) for key in WHAT}
    found = dict(read_full(open_checkpoint(trainer.out / name)))
    assert found.keys() == saved.keys()
    assert [key for key, value in saved.items() if not torch.equal(found[key], value)] == []


@pytest.mark.parametrize("offload", KINDS)
def test_a_run_with_offload_is_the_same_run(trainer, plain, offload) -> None:
    trainer.train(*SHORT, "--name", "moved", "--offload", offload)
    assert_same_run(trainer, "moved", plain)


def test_each_kind_goes_on_from_the_checkpoint_of_another(trainer, plain) -> None:
    for offload in ("[optimizer]", "[]", "[optimizer, parameters]"):
        trainer.train(*SHORT, "--name", "mixed", "--offload", offload, stop_after=2)
    assert_same_run(trainer, "mixed", plain)
