"""`routing.placement: load` in a run: experts move at its checkpoints, and what comes out is as if they had not."""

import json

import pytest
import torch
from safetensors.torch import load_file

from fivefold.observe.lines import read_lines
from fivefold.train import placing
from fivefold.train.use import export_run
from tests.ranks import run_workers
from tests.train.conftest import train_as_worker, trainer_in

MODEL = ["--model.moe", "{experts: 6, top_k: 2, ffn: 16}"]
SAVED, STOP, STEPS = 2, 4, 6
COMMON = (
    f"--precision.compute fp64 --batch.micro_size 4 --validate.every null --steps {STEPS} "
    f"--checkpoint.every {SAVED} --checkpoint.keep 9"
)
IN_ORDER = [0, 1, 2, 3, 4, 5]


def train_and_note(file, flags, stop_after):
    """Train as a worker, and write down from what placement to what each tensor of experts moved."""
    moves = []
    move = placing.move_experts

    def noted(tensor, before, after, mesh):
        moves.append([before, after])
        move(tensor, before, after, mesh)

    placing.move_experts = noted
    train_as_worker(file, flags, stop_after)
    if moves:
        file.with_name("moves.json").write_text(json.dumps(moves))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run on one rank, and one on two that share out the experts and move them, until they are stopped and go on
    without."""
    folder = tmp_path_factory.mktemp("placement")
    trainer = trainer_in(folder)

    def work(world, flags, stop_after=None):
        run_workers(world, folder, train_and_note, trainer.file, [*MODEL, *COMMON.split(), *flags.split()], stop_after)

    work(1, "--name still")
    work(2, "--name moved --parallel.ep 2 --routing.placement load", STOP)
    work(2, "--name moved --parallel.tp 2")
    return trainer


def test_a_run_that_moves_experts_has_the_losses_of_one_that_does_not(runs):
    for ours, theirs in zip(runs.metrics("moved"), runs.metrics("still"), strict=True):
        for key in ("loss", "grad_norm", "moe_load_max", "moe_entropy"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-10), (ours["step"], key)


def test_experts_move_after_the_choices_since_the_last_checkpoint(runs):
    moved = [event for event in runs.events("moved") if event["kind"] == "experts_moved"]
    first = moved[0]
    assert first["step"] == SAVED
    counts = [line["counts"] for line in read_lines(runs.out / "moved" / "experts.jsonl")][:SAVED]
    fullest = []
    for layer in counts[0]:
        choices = [sum(step) for step in zip(*(each[layer] for each in counts), strict=True)]
        fullest.append(max(sum(choices[:3]), sum(choices[3:])) * 2 / sum(choices))
    assert first["load_before"] in fullest
    assert first["load_after"] < 0.97 * first["load_before"]
    assert first["layers"] in (1, 2)
    assert f"not {first['load_before']:.2f}" in first["message"]
    assert not [event for event in runs.events("still") if event["kind"] == "experts_moved"]


def test_weights_and_moments_move_there_and_lie_in_order_in_the_next_checkpoint(runs):
    moves = json.loads(runs.file.with_name("moves.json").read_text())
    tensors = 6 * next(event for event in runs.events("moved") if event["kind"] == "experts_moved")["layers"]
    away, back = moves[:tensors], moves[tensors : 2 * tensors]
    assert [before for before, _ in away] == [IN_ORDER] * tensors
    assert [[after, before] for before, after in back] == away


def test_what_is_exported_is_in_the_order_of_the_experts(runs, tmp_path):
    weights = {}
    for name in ("moved", "still"):
        export_run(runs.out / name, tmp_path / name, step=STOP)
        weights[name] = load_file(tmp_path / name / "model.safetensors")
    assert weights["moved"].keys() == weights["still"].keys()
    for name, still in weights["still"].items():
        torch.testing.assert_close(weights["moved"][name], still, rtol=1e-6, atol=1e-8)
