"""A checkpoint that one layout saved is loaded by every other, weights and optimizer state byte for byte.

Each has weights of its own, so that nothing is right by being there already: layouts of four processes; tensors of
which some ranks hold nothing, over other numbers of ranks; a tied embedding in pipelines and outside of them; experts
and what their routers remember.
"""

import pytest
import torch

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.load import read_full
from fivefold.optim.offload import optimizer_for
from fivefold.parallel.state import sharded_parameters
from fivefold.train.build import buffers_of, build_pipeline
from fivefold.train.job import state_tensors
from tests.parity.cases import OPTIM, Case
from tests.parity.pieces import TOLERANCE, differing_copies, faults, piece
from tests.parity.rank import Rank, mesh_for
from tests.parity.reference import reference

FOUR = [
    Case("llama-two-layers", tp=4),
    Case("llama-two-layers", cp=4),
    Case("llama-two-layers", tp=2, cp=2),
    Case("llama-two-layers", tp=2, dp=2, zero=3),
    Case("llama-two-layers", cp=2, method="ulysses", dp=2),
    Case("llama-two-layers", dp=4, replicate=2, zero=2),
    Case("llama-two-layers", dp=4, zero=0),
    Case("llama-two-layers", tp=2, dp=2, recompute="full"),
    Case("llama-two-layers", dp=4, zero=2, offload=("optimizer",)),
    Case("llama-two-layers", tp=2, dp=2, zero=3, offload=("optimizer", "parameters")),
]
NARROW = [
    Case("narrow", dp=4, zero=3),
    Case("narrow", dp=3, zero=3),
    Case("narrow", tp=2),
    Case("narrow", tp=2, cp=2, zero=3),
    Case("narrow"),
]
FOLDED, FLAT = (
    Case("llama-tied", pp=2, schedule="zb-v", chunks=2, micro=2),
    Case("llama-tied", pp=2, micro=2),
)
TIED = [
    Case("llama-tied"),
    FOLDED,
    FLAT,
    Case("llama-tied", pp=2, schedule="interleaved", chunks=2, layers=(1, 2, 1, 1), micro=1, offload=("optimizer",)),
    Case("llama-tied", pp=2, schedule="zb-h1", micro=2, dp=2, zero=3),
    Case("llama-tied", pp=2, schedule="dualpipe-v", chunks=2, micro=2, tp=2),
]
EXPERTS = [
    Case("moe-bias"),
    Case("moe-bias", ep=4, dp=4, zero=3, packed=True),
    Case("moe-bias", tp=2, ep=4, dp=2, zero=2),
    Case("moe-bias", pp=2, schedule="zb-v", chunks=2, ep=2, dp=2, offload=("optimizer", "parameters")),
]
UNEVEN = [  # six experts over four ranks, or three over two, which are cut by their width
    Case("moe", dp=4, zero=3),
    Case("moe", ep=2, dp=4, zero=3),
]
THREE = [  # three experts of a width of three, of which one of four ranks has nothing
    Case("moe-three", dp=4, zero=3),
    Case("moe-three", ep=3, dp=3, zero=3),
    Case("moe-three", tp=2),
]
LAYOUTS = sorted([*FOUR, *NARROW, *TIED, *EXPERTS, *UNEVEN, *THREE], key=lambda case: case.world)


def save(case, folder, seed):
    """A step from the weights of a seed, then a checkpoint."""
    rank = Rank(case, seed=seed)
    rank.step(0)
    checkpointer = Checkpointer(folder / "checkpoints", keep=1, on_event=lambda *_: None)
    checkpointer.save(1, state_tensors(rank.state, rank.buffers, rank.optimizer.state()), {"step": 1})
    checkpointer.close()


def load_each(case, folders):
    """This rank's pieces of all that each checkpoint holds, loaded into a model that was filled with something else."""
    mesh = mesh_for(case.parallel)
    stages = build_pipeline(case.run, mesh).stages
    optimizer = optimizer_for(sharded_parameters(stages, mesh), OPTIM, case.offload, mesh.pp)
    tensors = state_tensors(optimizer.parameters, buffers_of(stages), optimizer.materialize())
    loaded = []
    for folder in folders:
        for tensor in tensors.values():
            piece_of(tensor).fill_(-7.0)
        checkpointer = Checkpointer(folder / "checkpoints", keep=1, on_event=lambda *_: None)
        assert checkpointer.load(checkpointer.latest(), tensors) == {"step": 1}
        checkpointer.close()
        loaded.append({name: piece(tensor) for name, tensor in tensors.items()})
    return loaded


def piece_of(tensor):
    """The memory of this rank's piece."""
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """By layout, the folder of its checkpoint and what one process reads from it."""
    found = {}
    for seed, case in enumerate(LAYOUTS):
        if case.dp == 3:
            continue  # three ranks have no equal shares of eight sequences: they only load
        folder = tmp_path_factory.mktemp("run")
        ranks.run(case.world, save, case, folder, seed)
        found[case] = folder, dict(read_full(open_checkpoint(folder)))
    return found


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_a_layout_loads_what_every_other_saved(ranks, saved, case):
    others = {other: found for other, found in saved.items() if other.model == case.model and other != case}
    by_rank = ranks.run(case.world, load_each, case, [folder for folder, _ in others.values()])
    for (other, (_, whole)), pieces in zip(others.items(), zip(*by_rank, strict=True), strict=True):
        assert list(faults(f"saved by {other}: value", whole, pieces, tolerance=0.0)) == []
        assert list(differing_copies(pieces)) == []


def test_no_two_layouts_saved_the_same(saved):
    """Else a load that does nothing would pass."""
    embeddings = [whole["model.embedding.weight"].flatten()[0].item() for _, whole in saved.values()]
    assert len(set(embeddings)) == len(saved)


def go_on(case, folder, step):
    """One step from the checkpoint of the step before, if there is one, and a checkpoint of it; its loss and norm."""
    rank = Rank(case, seed=step)
    checkpointer = Checkpointer(folder / "checkpoints", keep=1, on_event=lambda *_: None)
    if step:
        checkpointer.load(checkpointer.latest(), state_tensors(rank.state, rank.buffers, rank.optimizer.materialize()))
        rank.pipeline.renew_copies()
    result = rank.step(step)
    checkpointer.save(step + 1, state_tensors(rank.state, rank.buffers, rank.optimizer.state()), {"step": step + 1})
    checkpointer.close()
    return result.loss.item(), result.norm.item()


@pytest.mark.parametrize("layouts", [(FOLDED, TIED[0], FLAT), (FLAT, FOLDED, TIED[0])], ids=["folded", "flat"])
def test_a_run_that_changes_its_pipeline_at_each_step_has_the_losses_of_one_process(ranks, layouts, tmp_path):
    """The tied embedding is saved once, and the last stage's copy follows what was loaded."""
    expected = reference("llama-tied", packed=False, steps=len(layouts))
    for step, case in enumerate(layouts):
        for figures in ranks.run(case.world, go_on, case, tmp_path, step):
            assert figures == pytest.approx((expected.losses[step], expected.norms[step]), rel=TOLERANCE)
