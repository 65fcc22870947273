"""The crew of processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Crew, crew


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """The processes, in groups of as many as a test asks for."""
    with crew(tmp_path_factory.mktemp("ranks")) as started:
        yield started
