"""Sources registered by other packages: chosen by `name:rest`, read like any token set."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import numpy as np
import pytest

from fivefold.data.source import TokenSource, first_not_below, open_source
from fivefold.data.tokens import TokenSet
from fivefold.errors import UserError
from tests.data.corpora import write_set


class Numbers(TokenSource):
    """The numbers below N as one document each ten."""

    def __init__(self, rest: str) -> None:
        self.name = f"numbers:{rest}"
        self.tokens = int(rest)
        self.starts = np.arange(0, self.tokens, 10)

    def read(self, start: int, count: int) -> np.ndarray:
        return np.arange(start, start + count)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("numbers", f"{__name__}:Numbers", "fivefold.sources")
    real = importlib.metadata.entry_points
    monkeypatch.setattr(
        "fivefold.plugins.entry_points",
        lambda **chosen: [point] if chosen == {"group": "fivefold.sources"} else real(**chosen),
    )


@pytest.mark.usefixtures("registered")
def test_a_registered_source_is_opened_by_its_name() -> None:
    source = open_source(Path("numbers:35"))
    assert (source.tokens, source.read(3, 2).tolist()) == (35, [3, 4])
    assert source.documents_in(5, 20).tolist() == [5, 15]
    source.check_vocabulary(35)
    with pytest.raises(UserError, match="numbers:35: token 34 of 35 has the id 34"):
        source.check_vocabulary(34)


@pytest.mark.usefixtures("registered")
def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="numbers"):
        open_source("letters:35")


def test_all_else_is_a_token_set(tmp_path: Path) -> None:
    write_set(tmp_path / "set", [4])
    assert isinstance(open_source(tmp_path / "set"), TokenSet)
    write_set(tmp_path / "odd:name", [4])
    assert isinstance(open_source(tmp_path / "odd:name"), TokenSet)


def test_the_search_in_a_mapped_file_is_that_of_numpy(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 9, 300).tolist()
    source = write_set(tmp_path / "set", lengths)
    values = np.arange(-3, source.tokens + 3)
    assert (first_not_below(source.starts, values) == np.searchsorted(source.starts[:], values)).all()
