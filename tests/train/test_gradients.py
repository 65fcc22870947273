"""What a run does with gradients that are infinite, undefined or zero, and with every kind of clipping norm."""

import math
from importlib.metadata import EntryPoint

import pytest
import torch

from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.load import read_full
from fivefold.errors import UserError
from fivefold.optim.optimizer import ShardedOptimizer
from tests.train.test_kill_and_resume import computed

SHORT = ("--steps", "6", "--validate.every", "null", "--checkpoint.every", "1", "--checkpoint.keep", "10")
PARAMETER = "layers.1.ffn.down.weight"


@pytest.fixture
def fault(monkeypatch):
    """`fault(steps, change)`: in these steps of the next run `change(name, gradient)` is done to each gradient."""
    real = ShardedOptimizer.gradients

    def put(steps, change):
        calls = iter(range(1, 1000))

        def gradients(self):
            found = real(self)
            if next(calls) in steps:
                for name, gradient in zip(self.parameters, found, strict=True):
                    change(name, gradient)
            return found

        monkeypatch.setattr(ShardedOptimizer, "gradients", gradients)

    return put


def one_element(value):
    """Puts `value` into one element of one parameter's gradient."""

    def change(name, gradient):
        if name == PARAMETER:
            gradient.view(-1)[7] = value

    return change


def state_at(trainer, step):
    """Every tensor of a checkpoint: weights, moments, the optimizer's count."""
    return dict(read_full(open_checkpoint(trainer.out / "small", step)))


def changed(trainer, first, second):
    """The names of what differs between two checkpoints."""
    before, after = state_at(trainer, first), state_at(trainer, second)
    return {name for name in before | after if name not in before or not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(("value", "clip"), [(math.inf, "1.0"), (-math.inf, "null"), (math.nan, "1.0")])
def test_a_step_whose_gradient_is_not_finite_changes_nothing_and_names_the_parameter(trainer, fault, value, clip):
    fault({3}, one_element(value))
    output = trainer.train(*SHORT, "--optim.clip", clip)
    assert changed(trainer, 2, 3) == set()
    assert f"step 3: the gradient of {PARAMETER} is not finite; the step changed nothing" in output
    (event,) = [event for event in trainer.events() if event["kind"] == "step_skipped"]
    assert (event["step"], event["parameters"]) == (3, [PARAMETER])
    norms = [line["grad_norm"] for line in trainer.metrics()]
    assert [math.isfinite(norm) for norm in norms] == [True, True, False, True, True, True]
    assert changed(trainer, 3, 4) == set(state_at(trainer, 3))
    assert all(tensor.isfinite().all() for tensor in state_at(trainer, 6).values())


def test_several_bad_parameters_are_counted_and_all_named_in_the_event(trainer, fault):
    fault({1}, lambda name, gradient: gradient.fill_(math.nan))
    output = trainer.train(*SHORT)
    names = [name.removeprefix("model.") for name in state_at(trainer, 1) if name.startswith("model.")]
    assert f"and {len(names) - 1} more is not finite" in output
    (event,) = [event for event in trainer.events() if event["kind"] == "step_skipped"]
    assert sorted(event["parameters"]) == sorted(names)


@pytest.mark.parametrize("clip", ["1.0", "null"])
def test_gradients_of_zero_have_the_norm_zero_and_make_nothing_undefined(trainer, fault, clip):
    fault({1, 2, 3}, lambda name, gradient: gradient.zero_())
    trainer.train(*SHORT, "--optim.clip", clip)
    assert [line["grad_norm"] for line in trainer.metrics()][:3] == [0.0, 0.0, 0.0]
    assert all(tensor.isfinite().all() for tensor in state_at(trainer, 3).values())
    assert all(not tensor.any() for name, tensor in state_at(trainer, 3).items() if name.startswith("optim.exp_avg"))


def unfused(groups, optim):
    return torch.optim.AdamW(groups, lr=optim.lr, foreach=False)


@pytest.mark.parametrize("optimizer", ["adamw", "unfused"])
def test_a_run_whose_first_steps_were_all_skipped_resumes(trainer, fault, monkeypatch, optimizer):
    """An optimizer that never stepped has no moments yet: the checkpoint holds none, and its resume asked for them."""
    point = EntryPoint("unfused", "tests.train.test_gradients:unfused", "fivefold.optimizers")
    monkeypatch.setattr("fivefold.plugins.entry_points", lambda group: [point] if group == point.group else [])
    flags = (*SHORT, "--optim.name", optimizer)
    fault({1, 2}, one_element(math.nan))
    trainer.train(*flags, "--name", "whole")
    fault({1, 2}, one_element(math.nan))
    trainer.train(*flags, stop_after=2)
    fault((), None)
    trainer.train(*flags)
    assert computed(trainer.metrics())[2:] == computed(trainer.metrics("whole"))[2:]


def by_rows(groups, optim):
    return torch.optim.Adafactor(groups, lr=optim.lr)


@pytest.mark.parametrize("offload", ["[]", "[optimizer]"])
def test_an_optimizer_that_is_not_element_wise_is_refused_before_it_saved_what_no_layout_can_load(
    trainer, monkeypatch, offload
):
    """It trained otherwise in each sharded layout, and its checkpoints, of no tensor's shape, could not be loaded."""
    point = EntryPoint("by_rows", "tests.train.test_gradients:by_rows", "fivefold.optimizers")
    monkeypatch.setattr("fivefold.plugins.entry_points", lambda group: [point] if group == point.group else [])
    with pytest.raises(UserError, match=r"optim\.name = by_rows keeps row_var of shape \(\d+, 1\) for "):
        trainer.train(*SHORT, "--optim.name", "by_rows", "--offload", offload)
    assert not list((trainer.out / "small" / "checkpoints").iterdir())


@pytest.mark.parametrize("clip", ["0", "-1", "nan", ".nan", "-.inf"])
def test_a_clipping_norm_that_is_none_is_refused_before_anything_is_written(trainer, clip):
    with pytest.raises(UserError, match=r"optim\.clip = .*must be above 0; null \(or \.inf\) turns clipping off"):
        trainer.train("--optim.clip", clip)
    assert not trainer.out.exists()


def test_null_and_infinity_turn_clipping_off_and_a_small_norm_clips(trainer):
    for name, clip in {"off": "null", "word": "inf", "infinite": ".inf", "large": "1e9", "small": "1e-3"}.items():
        flags = ("--name", name, "--optim.clip", clip, "--optim.eps", "1e-3", "--checkpoint.every", "never")
        trainer.train(*SHORT, *flags)
    losses = {name: [line["loss"] for line in trainer.metrics(name)] for name in ("word", "infinite", "large", "small")}
    off = [line["loss"] for line in trainer.metrics("off")]
    assert losses["word"] == losses["infinite"] == losses["large"] == off
    assert losses["small"][0] == off[0]
    assert losses["small"][1:] != off[1:]
