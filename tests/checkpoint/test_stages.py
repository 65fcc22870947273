"""A checkpoint belongs to no pipeline: whatever stages saved it, any others load it, bit for bit, the optimizer too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.load import read_full
from fivefold.config.run import Optim
from fivefold.optim.offload import optimizer_for
from fivefold.parallel.state import sharded_parameters
from fivefold.train.job import state_tensors
from tests.checkpoint.example import Events, assert_same
from tests.parallel.stages import Layout, box_of, stages_of, whole
from tests.ranks import Crew, crew

ALONE = Layout()
LAYOUTS = {
    "alone": ALONE,
    "two chunks on one rank": Layout(chunks=2),
    "pp2": Layout(pp=2),
    "pp2, folded": Layout(pp=2, folded=True),
    "pp4": Layout(pp=4),
    "pp2 x dp2, zero 3": Layout(pp=2, dp=2, zero=3),
    "pp2 x tp2, two chunks": Layout(pp=2, tp=2, chunks=2),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Groups of as many processes as a layout has ranks."""
    with crew(tmp_path_factory.mktemp("ranks")) as started:
        yield started


def state(layout: Layout) -> dict[str, Tensor]:
    """This rank's part of all tensors of a run, with values that mean nothing."""
    parameters = sharded_parameters(stages_of(layout), layout.mesh)
    optimizer = optimizer_for(parameters, Optim(), (), layout.mesh.pp)
    return state_tensors(parameters, {}, optimizer.materialize())


def value(name: str, tensor: Tensor) -> Tensor:
    """What a tensor is in the checkpoint: a step of its own for each parameter, and random numbers."""
    return whole(name, tuple(tensor.shape), 0, tensor.dtype) if tensor.ndim else tensor.new_tensor(len(name))


@torch.no_grad()
def save(layout: Layout, run: Path) -> list[str]:
    """A checkpoint of what `value` says; the names of this rank's tensors."""
    tensors = state(layout)
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(value(name, tensor)[box_of(tensor)])
        else:
            tensor.copy_(value(name, tensor))
    checkpointer = Checkpointer(run / "checkpoints", keep=1, on_event=Events())
    checkpointer.save(3, tensors, {"step": 3})
    checkpointer.close()
    assert checkpointer.saved == 3
    return list(tensors)


def load(layout: Layout, runs: list[Path]) -> list[dict[str, bool]]:
    """Whether each tensor of this rank, loaded from each checkpoint, is what `value` says."""
    tensors = state(layout)
    found = []
    for run in runs:
        for tensor in tensors.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-7.0)
        checkpointer = Checkpointer(run / "checkpoints", keep=1, on_event=Events())
        assert checkpointer.load(checkpointer.latest(), tensors) == {"step": 3}
        checkpointer.close()
        found.append({name: loaded_rightly(name, tensor) for name, tensor in tensors.items()})
    return found


def loaded_rightly(name: str, tensor: Tensor) -> bool:
    expected = value(name, tensor)
    if isinstance(tensor, DTensor):
        return torch.equal(tensor.to_local(), expected[box_of(tensor)])
    return torch.equal(tensor, expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, ranks: Crew) -> dict[str, Path]:
    """A checkpoint by each layout."""
    folder = tmp_path_factory.mktemp("saved")
    for name in in_groups():
        ranks.run(LAYOUTS[name].world, save, LAYOUTS[name], folder / name)
    return {name: folder / name for name in LAYOUTS}


def in_groups() -> list[str]:
    """The layouts, those of as many ranks after each other, so that groups of processes change seldom."""
    return sorted(LAYOUTS, key=lambda name: -LAYOUTS[name].world)


def test_all_write_the_same_tensors(saved: dict[str, Path]) -> None:
    expected = dict(read_full(open_checkpoint(saved["alone"])))
    parameters = [name for name in expected if name.startswith("model.")]
    assert len(expected) == 4 * len(parameters), "step and two moments for each parameter"
    assert not [name for name in expected if "head" in name], "the copy of the embedding is not saved"
    for name, tensor in expected.items():
        assert torch.equal(tensor, value(name, tensor))
    for folder in saved.values():
        assert_same(dict(read_full(open_checkpoint(folder))), expected)


@pytest.mark.parametrize("layout", in_groups())
def test_a_layout_loads_what_every_other_one_saved(layout: str, saved: dict[str, Path], ranks: Crew) -> None:
    for rank in ranks.run(LAYOUTS[layout].world, load, LAYOUTS[layout], list(saved.values())):
        for name, rightly in zip(saved, rank, strict=True):
            assert rightly, "every rank has something"
            assert all(rightly.values()), f"saved by {name}: {[key for key, right in rightly.items() if not right]}"
