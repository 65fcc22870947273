"""What another package registers is found by name; what cannot be imported is said, not thrown."""

import pytest

from fivefold import plugins
from fivefold.errors import UserError

METADATA = "Metadata-Version: 2.1\nName: own\nVersion: 1\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package `own` with three decays, of which one exists."""
    information = tmp_path / "own-1.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(METADATA)
    (information / "entry_points.txt").write_text(
        "[fivefold.decays]\nsquare = own_decays:square\nlost = own_decays:lost\nabsent = own_absent:decay\n"
    )
    (tmp_path / "own_decays.py").write_text("def square(passed):\n    return (1 - passed) ** 2\n")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_registered_object_is_found_by_its_name(package):
    assert plugins.find("decays", "square", {})(0.5) == 0.25


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lost", "'lost' is registered under fivefold.decays as own_decays:lost, which cannot be imported: module"),
        ("absent", "as own_absent:decay, which cannot be imported: No module named 'own_absent'; try `python -c 'imp"),
    ],
)
def test_what_cannot_be_imported_is_named_with_its_place(package, name, says):
    with pytest.raises(UserError) as caught:
        plugins.find("decays", name, {})
    assert says in str(caught.value)


def test_an_unknown_name_is_answered_with_those_that_are_known(package):
    with pytest.raises(UserError, match=r"did you mean cosine\? known are absent, cosine, lost, square; others"):
        plugins.find("decays", "cosin", {"cosine": None})
