"""The learning rate at the places where its shape is known by hand."""

import pytest

from fivefold.config.run import Optim
from fivefold.optim.schedule import learning_rate


def rate(step, **fields):
    return learning_rate(Optim(lr=1.0, warmup_fraction=0.1, final_lr_fraction=0.1, **fields), step, 100)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd", "constant"])
def test_the_warm_up_rises_in_equal_steps_to_the_full_rate(decay):
    assert [rate(step, decay=decay) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])


def test_cosine_is_half_way_in_the_middle_of_the_decay_and_ends_at_the_last_step():
    assert [rate(step, decay="cosine") for step in (55, 100)] == pytest.approx([0.55, 0.1])


def test_linear_falls_in_equal_steps():
    assert [rate(step, decay="linear") for step in (10, 40, 70, 100)] == pytest.approx([1.0, 0.7, 0.4, 0.1])


def test_wsd_is_constant_until_a_fifth_before_the_end():
    assert [rate(step, decay="wsd") for step in (50, 80, 90, 100)] == pytest.approx([1.0, 1.0, 0.55, 0.1])


def test_decay_steps_say_how_long_the_decay_is():
    assert [rate(step, decay="linear", decay_steps=40) for step in (60, 80, 100)] == pytest.approx([1.0, 0.55, 0.1])


def test_constant_stays():
    assert rate(100, decay="constant") == 1.0


def test_without_warm_up_the_first_step_has_nearly_the_full_rate():
    optim = Optim(lr=1.0, warmup_fraction=0.0, final_lr_fraction=0.0, decay="linear")
    assert learning_rate(optim, 1, 10) == pytest.approx(0.9)


def test_a_decay_of_ones_own_registers_by_entry_point(monkeypatch):
    from importlib.metadata import EntryPoint

    point = EntryPoint("half", "tests.train.test_schedule:half", "fivefold.decays")
    monkeypatch.setattr("fivefold.plugins.entry_points", lambda group: [point] if group == "fivefold.decays" else [])
    assert rate(50, decay="half") == pytest.approx(0.1 + 0.9 * 0.5)


def half(passed):
    return 0.5
