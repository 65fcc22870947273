"""Families: the two built in, and one that a package registers by entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from torch import nn

from fivefold import plugins
from fivefold.config.run import Model
from fivefold.errors import UserError
from fivefold.model.family import Family, family
from fivefold.model.part import WHOLE, Part
from fivefold.model.transformer import Transformer

SIZES = {"layers": 1, "hidden": 8, "heads": 2, "ffn": 8, "vocab": 16}


class Own(nn.Module):
    def __init__(self, model: Model, part: Part) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(model.hidden, model.options["width"]) for _ in range(model.layers))


OWN = Family("own", Own, lambda parameters, model, seed: None)


@pytest.mark.parametrize("name", ["llama", "deepseek", "bloom"])
def test_the_built_in_ones_build_the_transformer_and_know_their_files(name: str) -> None:
    found = family(Model(**SIZES, family=name))
    assert found.name == name
    assert isinstance(found.build(Model(**SIZES), WHOLE), Transformer)
    assert found.huggingface is not None


def test_a_registered_one_is_found_by_its_name_and_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("own", f"{__name__}:OWN", "fivefold.families")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == "fivefold.families" else [])
    model = Model(**SIZES, family="own", options={"width": 5})
    found = family(model)
    assert found is OWN
    assert found.build(model, WHOLE).layers[0].out_features == 5


def test_an_unknown_one_is_refused_with_the_known_names() -> None:
    with pytest.raises(UserError, match=r"'lama': did you mean llama\? known are bloom, deepseek, llama"):
        family(Model(**SIZES, family="lama"))
