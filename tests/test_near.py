"""A name that does not exist is refused with the one that was probably meant, wherever a name is asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from fivefold.cli import commands
from fivefold.errors import UserError
from fivefold.near import did_you_mean, near_names
from fivefold.plan.budget import state_named
from fivefold.plan.goodput.failures import failures_of
from fivefold.plan.software import stack

SCHEDULES = ["naive", "gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"]
RUN = """\
name: a
steps: 1
model: {preset: tiny-llama, vocab: 1000}
data: {train: [{path: data/a}]}
"""


@pytest.mark.parametrize("name", ["zbv", "ZB-V", "zb_v", "zb v"])
def test_capitals_dashes_and_spaces_make_no_difference(name: str) -> None:
    assert near_names(name, SCHEDULES) == ["zb-v"]


def test_of_names_that_are_as_near_the_one_written_alike_is_first() -> None:
    assert near_names("zb-h", ["zbh1", "zb-h1"], most=2) == ["zb-h1", "zbh1"]


def test_a_name_that_is_like_none_gets_no_question() -> None:
    assert did_you_mean("pancake", SCHEDULES) == ""
    assert did_you_mean("", SCHEDULES) == ""


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["schedule", "zbv"], "zb-v"),
        (["schedule", "dualpipe", "--pp", "4", "--microbatches", "8"], "dualpipe-v"),
        (["presets", "llama3-8b"], "llama-3-8b"),
        (["check", "run.yaml", "--model.preset", "tinyllama"], "tiny-llama"),
        (["check", "run.yaml", "--parallel.schedule", "dualpipev"], "dualpipe-v"),
        (["check", "run.yaml", "--optim.name", "adam-w"], "adamw"),
        (["check", "run.yaml", "--optim.decay", "cosin"], "cosine"),
        (["check", "run.yaml", "--model.family", "deep-seek"], "deepseek"),
        (["check", "run.yaml", "--batch.microsize", "1"], "`--batch.micro_size`"),
        (["plan", "run.yaml", "--gpus", "8", "--gpu", "h1o0"], "H100-SXM-80GB"),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_every_command_that_takes_a_name_asks_for_a_near_one(
    words: list[str], meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(RUN)
    found = CliRunner().invoke(commands, words, prog_name="fivefold")
    assert found.exit_code == 2
    assert re.search(rf"did you mean {re.escape(meant)}( or [^?]+)?\? ", found.stderr), found.stderr


@pytest.mark.parametrize(
    ("ask", "name", "meant"),
    [
        (failures_of, "lama3", "llama3"),
        (state_named, "mega-tron", "megatron"),
        (stack, "megatron2025", "megatron-2025"),
    ],
)
def test_so_do_the_functions_of_the_planner(ask, name: str, meant: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=rf"did you mean {meant}\? known are "):
        ask(name)
