"""What is legal and should be known: each key that does nothing is noted where it was set, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold import Run
from fivefold.config.files import dump_run, load_run
from fivefold.config.models import preset_names
from fivefold.config.notable import NOTABLE, notes_on
from fivefold.config.rules import LEGALITY

RUN_FILE = "name: a\nsteps: 10\nmodel: {{preset: {preset}}}\ndata: {{train: [{{path: data/a}}], seq_len: 64}}\n"

NOTED = [
    ("tiny-llama", "--parallel.schedule zb-h1", "parallel.schedule = zb-h1 does nothing: with parallel.pp = 1"),
    ("tiny-llama", "--parallel.schedule auto --parallel.schedule_memory 2", "schedule_memory = 2.0 does nothing"),
    (
        "tiny-llama",
        "--parallel.layers_per_stage memory",
        "layers_per_stage = memory does nothing: with parallel.pp = 1",
    ),
    ("tiny-llama", "--parallel.zero 2 --parallel.pp 2", "zero = 2 does nothing: with parallel.pp = 2 gradients are"),
    ("tiny-llama", "--parallel.cp_method gather", "cp_method = gather does nothing: with parallel.cp = 1"),
    *(
        ("tiny-moe", f"--routing.placement load {line}", f"routing.placement = load does nothing: {why}")
        for line, why in [
            ("--checkpoint.every 5", "it moves experts between the ranks of parallel.ep, which is 1"),
            ("--checkpoint.every 5 --parallel.ep 8", "each of parallel.ep = 8 ranks has one expert of each layer"),
            (
                "--checkpoint.every 5 --parallel.ep 4 --model.moe.groups 4 --model.moe.top_groups 2",
                "each of parallel.ep = 4 ranks has one of model.moe.groups = 4, whose experts stay together",
            ),
            ("--checkpoint.every 5 --parallel.ep 2 --model.moe.top_k 8", "model.moe.top_k = 8 sends each token to all"),
            *(
                (
                    f"--checkpoint.every {every} --parallel.ep 2",
                    f"experts move at checkpoints before the last step, and checkpoint.every = {every} writes none in "
                    "10 steps",
                )
                for every in ("10", "null", "never")
            ),
        ]
    ),
    (
        "tiny-moe",
        "--routing.capacity_factor 4",
        "capacity_factor = 4.0 does nothing: so many times an even share, 2 / 8",
    ),
    ("tiny-llama", "--optim.decay constant --optim.final_lr_fraction 0", "final_lr_fraction = 0.0 does nothing"),
    ("tiny-llama", "--validate.every 5", "validate.every = 5 does nothing: data.validation has no token set"),
    ("tiny-llama", "--validate.tokens 5", "validate.tokens = 5 does nothing: data.validation has no token set"),
    ("tiny-deepseek", "--model.kv_heads 4", "model.kv_heads = 4 does nothing: the heads of model.mla"),
    ("tiny-deepseek", "--model.head_dim 64", "model.head_dim = 64 does nothing: the heads of model.mla"),
    ("tiny-bloom", "--model.rope_theta 5e5", "model.rope_theta = 500000.0 does nothing: model.position = alibi"),
    ("tiny-llama", '--model.options {"width":5}', "model.options = {'width': 5} does nothing: it is for a family"),
    *(
        (
            "tiny-llama",
            f"--model.rope_scaling.factor 2 --model.rope_scaling.type linear --model.rope_scaling.{key} 3",
            f"model.rope_scaling.{key} = 3{'' if key == 'original_context' else '.0'} does nothing: it is of {of}, and "
            "type = linear",
        )
        for key, of in [
            ("original_context", "llama3 and yarn"),
            *[(key, "llama3") for key in ("low_freq_factor", "high_freq_factor")],
            *[(key, "yarn") for key in ("beta_fast", "beta_slow", "attention_factor")],
        ]
    ),
    ("tiny-deepseek", "--loss.mtp 0", "model.mtp = 1 predicts further tokens, but loss.mtp = 0 trains none of it"),
    ("tiny-switch", "", "nothing balances the 8 experts: loss.balance_sequence and loss.balance_global are 0, and"),
    ("tiny-switch", "", "model.moe.bias = false gives them no bias"),
    ("tiny-moe", "--routing.bias_rate 0", "routing.bias_rate = 0 leaves model.moe.bias as it is; few of them"),
    ("tiny-switch", "--model.moe.normalize true", "makes every gate 1, so the router learns nothing"),
]
UNBALANCED = ("tiny-switch", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b")
"""Presets whose publishers balanced them by a loss, which is no part of an architecture."""
SILENT = [
    ("tiny-llama", "--parallel.schedule zb-v --parallel.chunks 2"),
    ("tiny-llama", "--parallel.schedule zb-h1 --parallel.pp 2"),
    ("tiny-llama", "--parallel.schedule 1f1b --parallel.cp_method ring --validate.every 100 --parallel.zero 1"),
    ("tiny-llama", "--parallel.zero 3 --parallel.pp 2"),
    ("tiny-llama", "--parallel.cp_method gather --parallel.cp 2"),
    ("tiny-llama", "--validate.every null"),
    *(
        ("tiny-moe", f"--routing.placement load {line}")
        for line in (
            "--parallel.ep 2 --checkpoint.every 9",
            "--parallel.ep 2 --checkpoint.every 30min",
            "--parallel.ep 2 --checkpoint.every 5 --model.moe.groups 4",
            "--parallel.ep 4 --checkpoint.every 5 --model.moe.groups 2",
        )
    ),
    ("tiny-moe", "--routing.capacity_factor 3.9"),
    ("tiny-moe", "--routing.bias_rate 0 --loss.balance_sequence 0.001"),
    ("tiny-switch", "--loss.balance_global 0.01"),
    ("tiny-switch", "--model.moe.top_k 8 --model.moe.normalize true"),
    ("tiny-deepseek", "--loss.mtp 0.1"),
    *((name, "") for name in preset_names() if name not in UNBALANCED),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def run(file: Path, preset: str, line: str) -> Run:
    file.write_text(RUN_FILE.format(preset=preset))
    return load_run(file, line.split(" ") if line else [], LEGALITY)


def notes(file: Path, preset: str, line: str) -> tuple[str, ...]:
    return notes_on(run(file, preset, line))


@pytest.mark.parametrize(("preset", "line", "expected"), NOTED)
def test_a_key_that_does_nothing_is_noted(file: Path, preset: str, line: str, expected: str) -> None:
    found = notes(file, preset, line)
    assert [note for note in found if expected in note], found


@pytest.mark.parametrize(("preset", "line"), SILENT)
def test_what_does_something_and_what_is_at_its_default_is_not(file: Path, preset: str, line: str) -> None:
    assert notes(file, preset, line) == ()


def test_a_run_that_is_written_out_with_all_its_keys_gets_no_note(file: Path) -> None:
    file.write_text(RUN_FILE.format(preset="tiny-llama"))
    file.write_text(dump_run(load_run(file)))
    assert notes_on(load_run(file)) == ()


def test_each_row_applies_to_a_line_above(file: Path) -> None:
    applied = set()
    for preset, line, _ in NOTED:
        found = run(file, preset, line)
        applied |= {rule.name for rule in NOTABLE if rule.broken(found)}
    assert applied == {rule.name for rule in NOTABLE}
