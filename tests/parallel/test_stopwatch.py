"""Waiting for a transfer is timed where somebody reads the time, and only then."""

import time

import pytest
import torch

from fivefold.parallel.axis import Axis, Pending
from fivefold.parallel.stopwatch import Stopwatch

SLOW_S = 0.02


class SlowWork:
    """A transfer that takes a while after somebody began to wait for it."""

    def wait(self) -> None:
        time.sleep(SLOW_S)


def waited(stopwatch: Stopwatch | None) -> None:
    """Wait for one slow transfer."""
    x = torch.zeros(1)
    assert Pending(x, [SlowWork()], x, stopwatch).wait() is x


def test_a_lap_has_the_waiting_since_the_last_one() -> None:
    stopwatch = Stopwatch(torch.device("cpu"))
    waited(stopwatch)
    assert stopwatch.lap().seconds() == 0.0, "nobody read it yet, so nothing was kept"
    for _ in range(2):
        waited(stopwatch)
    time.sleep(SLOW_S)
    lap = stopwatch.lap()
    assert len(lap.spans) == 2
    assert lap.seconds() == pytest.approx(sum(end.seconds - begin.seconds for begin, end in lap.spans))
    assert lap.seconds() >= 2 * SLOW_S
    assert stopwatch.lap().seconds() == 0.0


def test_a_transfer_without_a_stopwatch_is_waited_for_all_the_same() -> None:
    waited(None)
    assert Axis(2, 0).stopwatch is None
    assert Axis(2, 0, None, Stopwatch(torch.device("cpu"))) == Axis(2, 0), "who they are does not depend on it"
