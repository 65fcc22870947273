from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.crew import Crew


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Four gloo ranks, started once."""
    crew = Crew(4, tmp_path_factory.mktemp("crew"))
    yield crew
    crew.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    """DCP warns at each save that one process is one process; pytest undoes the room's own filter."""
    item.add_marker(pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"))
