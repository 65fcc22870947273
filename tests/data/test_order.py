"""The sample order: shares at every prefix, whole permutations, and nothing but (seed, index) in it."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest

from fivefold.data.order import SampleOrder
from fivefold.errors import UserError

PINNED = [0, 1, 0, 0, 0, 0, 1, 0], [697, 44, 129, 511, 503, 26, 21, 720]
"""Sources and windows of some samples: a change of these breaks the resume of every run."""


@pytest.mark.parametrize(
    ("weights", "bound"),
    [
        ([1, 1], 0.5),
        ([0.7, 0.3], 0.5),
        ([1, 1e-6], 0.5),
        ([1, 2, 3, 4, 5], 1.0),
        ([1] * 17, 1.0),
        ([0.9, 0.05, 0.03, 0.02], 1.0),
        ([2.0**-k for k in range(12)], 1.0),
        (list(np.random.default_rng(0).random(40)), 1.5),
    ],
)
def test_every_prefix_has_its_share_of_each_source(weights: list[float], bound: float) -> None:
    count = 20_000
    source, _ = SampleOrder([1000] * len(weights), weights, seed=3).locate(np.arange(count))
    for number, weight in enumerate(weights):
        exact = np.arange(1, count + 1) * (weight / sum(weights))
        assert np.abs(np.cumsum(source == number) - exact).max() <= bound + 1e-6


def test_shares_stay_exact_after_a_trillion_samples() -> None:
    order = SampleOrder([10**9, 10**9], [1, 3], seed=0)
    before = order._root.count_left(np.array([10**12]))
    assert int(before[0]) == Fraction(1, 4) * 10**12


def test_a_source_reads_each_window_once_an_epoch_and_each_epoch_in_another_order() -> None:
    order = SampleOrder([100, 7], [3, 1], seed=5)
    source, window = order.locate(np.arange(1600))
    for number, size in ((0, 100), (1, 7)):
        epochs = window[source == number][: size * 10].reshape(10, size)
        assert (np.sort(epochs, axis=1) == np.arange(size)).all()
        assert len({tuple(each) for each in epochs}) == 10


@pytest.mark.parametrize("windows", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_any_number_of_windows_is_permuted_whole(windows: int) -> None:
    _, window = SampleOrder([windows], [1.0], seed=1).locate(np.arange(3 * windows))
    assert (np.sort(window.reshape(3, windows), axis=1) == np.arange(windows)).all()


def test_an_index_alone_gives_what_it_has_in_any_company() -> None:
    order = SampleOrder([100, 50, 3], [1, 2, 0.5], seed=9)
    together = np.stack(order.locate(np.arange(500)))
    alone = np.stack([np.concatenate(order.locate(np.array([i]))) for i in range(500)], axis=1)
    shuffled = np.random.default_rng(0).permutation(500)
    assert (together == alone).all()
    assert (np.stack(order.locate(shuffled)) == together[:, shuffled]).all()


def test_the_shape_of_the_indices_is_kept() -> None:
    source, window = SampleOrder([9], [1], seed=0).locate(np.arange(6).reshape(2, 3))
    assert source.shape == window.shape == (2, 3)


def test_seeds_and_sources_have_orders_of_their_own() -> None:
    def first(seed: int) -> list[int]:
        return SampleOrder([1000], [1], seed).locate(np.arange(1000))[1].tolist()

    assert first(0) == first(0)
    assert first(0) != first(1) != first(-1)
    source, window = SampleOrder([1000, 1000], [1, 1], 0).locate(np.arange(2000))
    assert (window[source == 0] != window[source == 1]).mean() > 0.99


def test_the_order_is_the_same_for_ever() -> None:
    source, window = SampleOrder([1000, 50], [2, 1], seed=42).locate(np.array([0, 1, 2, 3, 149, 150, 10**9, 10**12]))
    assert source.tolist() == PINNED[0]
    assert window.tolist() == PINNED[1]


def test_permutations_look_random() -> None:
    """Where window 0 goes over 4,000 seeds is uniform; a window and its neighbour are not correlated."""
    places = [int(SampleOrder([16], [1], seed).locate(np.array([0]))[1][0]) for seed in range(4000)]
    counts = np.bincount(places, minlength=16)
    assert ((counts - 250) ** 2 / 250).sum() < 45  # chi-square, 15 degrees of freedom: 1 in 10,000
    _, window = SampleOrder([100_000], [1], seed=7).locate(np.arange(100_000))
    assert abs(np.corrcoef(window[:-1], window[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(window, np.arange(100_000))[0, 1]) < 0.02


def test_weight_zero_is_never_read() -> None:
    source, _ = SampleOrder([10, 10, 0], [1, 0, 0], seed=0).locate(np.arange(100))
    assert set(source.tolist()) == {0}


@pytest.mark.parametrize(
    ("windows", "weights", "message"),
    [
        ([1], [1, 2], "1 sources but 2 weights"),
        ([5, 5], [1, -1], "source 1 has the weight -1"),
        ([5], [float("nan")], "the weight nan"),
        ([5, 5], [0, 0], "all data sources have the weight 0"),
        ([0], [1], "source 0 has no window"),
    ],
)
def test_impossible_sources_are_refused(windows: list[int], weights: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SampleOrder(windows, weights, 0)


def test_the_order_needs_no_torch() -> None:
    code = (
        "import sys, fivefold.data.order, fivefold.data.tokens, fivefold.data.build; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
