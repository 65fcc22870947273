"""What ranks that share out experts keep of a microbatch is what autograd saves there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fivefold.config.run import Parallel
from fivefold.model import feed_forward
from fivefold.parallel.mesh import mesh_of
from tests.pipeline.test_stage_bytes import MIXTURES, SavesItsInput, run_of, saved_bytes, training, whole
from tests.ranks import Crew, crew, kept


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew(tmp_path_factory.mktemp("ranks")) as started:
        yield started


def saved(model: str, world: int, near: int) -> int:
    """On this rank, of which all hold the same tokens."""
    feed_forward.swiglu = SavesItsInput.apply  # type: ignore[assignment]
    if ("mesh", near) not in kept:
        kept["mesh", near] = mesh_of(Parallel(ep=world, dp=world), torch.device("cpu"), near)
    mesh = kept["mesh", near]
    legs = mesh.ep_by_node if near < world else (mesh.ep,)
    forward, built = training(run_of(MIXTURES[model]), ep=mesh.ep, ep_legs=legs)
    torch.manual_seed(0)
    for parameter in built.parameters():  # so that tokens choose by lot
        torch.nn.init.normal_(parameter)
    return saved_bytes(built, forward)


@pytest.mark.parametrize(
    ("model", "world", "near"),
    [("experts", 2, 2), ("groups of experts", 2, 2), ("groups of experts", 4, 4), ("groups of experts", 4, 2)],
)
def test_what_comes_from_other_ranks_is_kept_and_counted(model: str, world: int, near: int, ranks: Crew) -> None:
    """The mean over the ranks, within 4 %; of the first of two legs small indices are not counted."""
    said = whole(run_of(MIXTURES[model], parallel=Parallel(dp=world, ep=world))).forward
    assert sum(ranks.run(world, saved, model, world, near)) / world == pytest.approx(said, rel=0.04)
