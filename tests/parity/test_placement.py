"""Experts that move between ranks change nothing: a run in which they do equals one process in which they lie still.

After two steps they are placed by the load of these, and two further steps follow. Weights, moments and what routers
remember are compared in the order of the experts, as a checkpoint holds them.
"""

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.load import read_full
from fivefold.config.rules import check
from fivefold.config.run import Parallel, Routing
from fivefold.model.spec import moe_layers
from fivefold.parallel.move_experts import move_experts
from fivefold.train.job import state_tensors
from fivefold.train.placing import KEY, ExpertPlacement
from fivefold.train.reported import choices_by_layer
from tests.parity.cases import MODELS, ROUTING, Case
from tests.parity.pieces import TOLERANCE, differing_copies, faults, piece
from tests.parity.rank import Rank, mesh_for
from tests.parity.reference import reference

STEPS = 4
LAYOUTS = [
    Case("moe-bias", ep=2, dp=2, offload=("optimizer",), steps=STEPS),
    Case("moe-bias", ep=2, dp=2, offload=("optimizer", "parameters"), zero=3, steps=STEPS),
    Case("moe-capacity", ep=2, cp=2, steps=STEPS),
    Case("moe-empty", ep=4, dp=4, zero=2, packed=True, steps=STEPS),
    Case("moe-empty", ep=4, near=2, dp=4, zero=3, steps=STEPS),  # tokens go by nodes
    Case("moe-bias", ep=2, dp=4, steps=STEPS),  # whole experts on two replicas
    Case("moe", ep=2, dp=4, zero=3, steps=STEPS),  # three experts on two, by their width
    Case("mtp-moe", ep=2, pp=2, schedule="zb-v", chunks=2, tp=2, steps=STEPS),
]
CHAIN = [  # layouts of one step each, with their placement
    (Case("mtp-moe", dp=4, micro=2), "fixed"),
    (Case("mtp-moe", ep=2, tp=2, dp=2, zero=3), "load"),
    (Case("mtp-moe", ep=2, pp=2, schedule="zb-h1", dp=2), "load"),
]
EXPERTS = ("ffn.experts.gate_up", "ffn.experts.down")


class Placed(Rank):
    """A rank of a run that places experts as its run file says."""

    def __init__(self, case, placement):
        routing = ROUTING.get(case.model, Routing()).model_copy(update={"placement": placement})
        super().__init__(case, routing=routing)
        run = case.run.model_copy(update={"routing": routing})
        self.placement = ExpertPlacement(run, self.pipeline, self.optimizer, self.mesh)

    def step(self, number):
        """One optimizer step, whose choices are counted."""
        result = super().step(number)
        self.placement.count(choices_by_layer(self.case.run.model, result.totals))
        return result

    def decide(self):
        """Where experts lie from now on: as if those with the lowest numbers, all on one rank, were the hottest."""
        experts = self.case.run.model.moe.experts
        self.placement.count(dict.fromkeys(moe_layers(self.case.run.model), range(10_000, 0, -10_000 // experts)))
        return self.placement.decide()

    def pieces(self):
        """This rank's pieces of weights, buffers and moments."""
        moments = {name: piece(each) for name, each in self.optimizer.state().items() if each.ndim}
        return self.parameters() | moments


def move_after_two_steps(case):
    """What a rank sees: losses, what moved, its pieces where they lie, and in the order of the experts."""
    rank = Placed(case, "load")
    losses = [rank.step(number).loss.item() for number in range(2)]
    moved = rank.decide()
    with rank.placement.experts_in_order():
        pass
    losses += [rank.step(number).loss.item() for number in range(2, STEPS)]
    moved_pieces = rank.pieces()
    with rank.placement.experts_in_order():
        return losses, moved, moved_pieces, rank.pieces()


@pytest.mark.parametrize("case", sorted(LAYOUTS, key=lambda case: case.world), ids=str)
def test_a_run_whose_experts_move_equals_one_process(ranks, case):
    assert check(case.run, case.world) == []
    expected = reference(case.model, case.packed, steps=STEPS)
    whole = expected.parameters | expected.moments
    losses, moved, where_they_lie, in_order = zip(*ranks.run(case.world, move_after_two_steps, case), strict=True)
    for ours in losses:
        assert ours == pytest.approx(expected.losses, rel=TOLERANCE)
    assert list(faults("value", whole, in_order, TOLERANCE)) == []
    assert list(differing_copies(in_order)) == []
    assert len(set(moved)) == 1
    assert moved[0].layers == len(moe_layers(case.run.model))
    assert moved[0].after < moved[0].before
    elsewhere = {name for name in whole if list(faults("value", {name: whole[name]}, where_they_lie, 1e-3))}
    assert elsewhere == {name for name in whole if name.endswith(EXPERTS)}, "what has moved is not the experts"


def go_on(case, placement, folder, step):
    """One step from the checkpoint of the step before, if there is one, and a checkpoint of it.

    The step's loss and norm; in what slots experts lie in it, and will lie after it.
    """
    rank = Placed(case, placement)
    checkpointer = Checkpointer(folder / "checkpoints", keep=1, on_event=lambda *_: None)
    if step:
        tensors = state_tensors(rank.state, rank.buffers, rank.optimizer.materialize())
        numbers = checkpointer.load(checkpointer.latest(), tensors)
        rank.pipeline.renew_copies()
        rank.placement.restore(numbers)
    now = rank.placement.state()
    result = rank.step(step)
    rank.decide()
    with rank.placement.experts_in_order():
        tensors = state_tensors(rank.state, rank.buffers, rank.optimizer.state())
        checkpointer.save(step + 1, tensors, rank.placement.state())
    checkpointer.close()
    return (result.loss.item(), result.norm.item()), now, rank.placement.state()


def test_a_checkpoint_of_moved_experts_is_loaded_by_another_layout(ranks, tmp_path):
    """And it holds experts in their order, for whoever exports or generates."""
    expected = reference("mtp-moe", packed=False, steps=len(CHAIN))
    slots = []
    for step, (case, placement) in enumerate(CHAIN):
        for figures, *now_and_then in ranks.run(case.world, go_on, case, placement, tmp_path, step):
            assert figures == pytest.approx((expected.losses[step], expected.norms[step]), rel=TOLERANCE)
            slots.append(now_and_then)
    first, second, third = (slots[start : start + 4] for start in (0, 4, 8))
    in_order = {KEY: {str(number): list(range(8)) for number in moe_layers(MODELS["mtp-moe"])}}
    moved = second[0][1]
    assert moved != in_order
    assert first == [[{}, {}]] * 4
    assert second == [[in_order, moved]] * 4
    assert [now for now, _ in third] == [moved] * 4
    stored = dict(read_full(open_checkpoint(tmp_path)))
    for kind, tensors in {"model": expected.parameters, "optim": expected.moments}.items():
        for name, whole in tensors.items():
            assert (stored[f"{kind}.{name}"] - whole).norm() <= TOLERANCE * whole.norm(), name


def move_rows(before, after):
    """Of tensors of six experts that are cut in several ways, the pieces of this rank after a move."""
    mesh = mesh_for(Parallel(ep=2, dp=4))
    row = torch.arange(6.0)[:, None, None] + torch.arange(4.0)[:, None] / 10 + torch.zeros(5)
    found = []
    for over_replicas in (Replicate(), Shard(0), Shard(1), Shard(2)):
        replicated = DTensor.from_local(row.clone(), mesh.experts, [Replicate()] * 3, run_check=False)
        cut = replicated.redistribute(placements=[Shard(0), Replicate(), over_replicas])
        move_experts(cut, before, after, mesh)
        found.append(piece(cut))
    return found


def test_rows_go_to_their_slots_however_they_are_cut(ranks):
    """Three experts of a rank on two replicas among the ways; and there and back."""
    orders = [(0, 1, 2, 3, 4, 5), (5, 3, 1, 0, 2, 4), (1, 0, 3, 2, 5, 4)]
    for before, after in itertools.permutations(orders, 2):
        rows = torch.empty(6, 4, 5)
        for expert, slot in enumerate(after):
            rows[slot] = before[expert] + torch.arange(4.0)[:, None] / 10
        by_rank = ranks.run(4, move_rows, before, after)
        for pieces in zip(*by_rank, strict=True):
            assert list(faults("row", {"rows": rows}, [{"rows": each} for each in pieces], 0.0)) == []
