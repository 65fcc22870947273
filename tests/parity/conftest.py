"""The crew of processes and the harness that all parity tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.harness import Harness
from tests.ranks import Crew, crew


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """The processes, in groups of any size up to eight."""
    with crew(tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture(scope="module")
def harness(ranks: Crew) -> Harness:
    """Compares layouts with one process."""
    return Harness(ranks)
