"""What all tests share: one thread a process, for the models are tiny and the worker processes many."""

import os
from collections.abc import Iterator

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, here and in the workers that tests start

SLOW_ROOMS = ("tests/parity", "tests/train", "tests/launch", "tests/checkpoint")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that no core waits at the end for one of them."""
    items.sort(key=lambda item: not item.nodeid.startswith(SLOW_ROOMS))


@pytest.fixture(autouse=True)
def compiles_anew(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a GPU test has compiled is forgotten behind it: after eight forms of a function torch compiles no further
    one, and flex attention then rounds scores that its kernel would not."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        torch.compiler.reset()
