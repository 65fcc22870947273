"""Every key of the run file is a flag."""

from __future__ import annotations

import pytest

from fivefold.config.keys import dotted_keys, type_at
from fivefold.config.overrides import apply, parse, split_arguments
from tests.config.conftest import Load, Refusal


def test_both_ways_of_writing_a_flag_mean_the_same(load: Load) -> None:
    assert load("--optim.lr", "1e-3").optim.lr == 1e-3
    assert load("--optim.lr=1e-3").optim.lr == 1e-3


def test_a_flag_lies_over_the_file_and_the_last_one_counts(load: Load) -> None:
    assert load("--steps", "5", "--steps=7").steps == 7


def test_words_of_yaml_1_1_stay_text(load: Load) -> None:
    run = load("--log.wandb", "off", "--parallel.schedule", "1f1b")
    assert (run.log.wandb, run.parallel.schedule) == ("off", "1f1b")


def test_a_negative_value_is_a_value(refusal: Refusal) -> None:
    assert "optim.clip = -1.0" in refusal("--optim.clip", "-1")
    assert "optim.clip = -0.001" in refusal("--optim.clip", "-1e-3")
    assert "optim.clip = -inf" in refusal("--optim.clip", "-.inf")


def test_lists_and_sections_can_be_given_whole_or_by_item(load: Load) -> None:
    assert [str(s.path) for s in load("--data.train", "[{path: x}, {path: y, weight: 3}]").data.train] == ["x", "y"]
    assert load("--data.train.0.weight", "2").data.train[0].weight == 2.0
    assert load("--data.train", "[{path: x}]", "--data.train.0.weight", "2").data.train[0].weight == 2.0
    assert load("--optim", "{lr: 1e-3}").optim.lr == 1e-3
    assert load("--optim.betas.1", "0.99").optim.betas == (0.9, 0.99)


def test_a_model_given_whole_lies_over_the_preset_that_it_names(load: Load) -> None:
    whole = "--model={preset: tiny-moe, moe: {experts: 2, top_k: 2, ffn: 8}}"
    model = load("--model.layers", "9", whole, "--model.heads", "4").model
    assert (model.layers, model.heads, model.hidden, model.family) == (4, 4, 256, "llama")
    assert (model.moe.experts, model.moe.ffn, model.moe.scores) == (2, 8, "sigmoid")  # scores are the preset's
    assert load(whole, "--model.moe.ffn=16").model.moe.ffn == 16


def test_short_flags_stand_for_the_clusters(load: Load) -> None:
    run = load("--gpu", "h100", "--gpus", "2")
    assert (run.cluster.gpu, run.cluster.gpus) == ("h100", 2)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--optim.lr"], "`--optim.lr` needs a value: --optim.lr VALUE"),
        (["--optim.lr", "--seed", "1"], "`--optim.lr` needs a value"),
        (["--optim.lrr", "1"], "`--optim.lrr` does not exist; did you mean `--optim.lr`?"),
        (["--lr", "1"], "`--lr` does not exist; did you mean `--optim.lr`?"),
        (["--optim.lr.x", "1"], "`--optim.lr.x` does not exist"),
        (["--data.train.weight", "1"], "did you mean `--data.train.0.weight`?"),
        (["--data.train.2.weight", "1"], "`--data.train.2.weight`: data.train has no item 2; it has 2, counted from 0"),
        (["--data.train.0.wait", "1"], "did you mean `--data.train.0.weight`?"),
        (["--model.rope_scaling.factor", "2"], "model.rope_scaling lacks type (type: one of linear, llama3, yarn)"),
        (["--offload", "[a"], "flag --offload is not valid YAML"),
        (["optim.lr", "1"], "`optim.lr` is neither a flag nor a flag's value"),
        (["-optim.lr"], "`-optim.lr` is neither a flag nor a flag's value"),
    ],
)
def test_a_flag_that_sets_nothing_is_refused(refusal: Refusal, flags: list[str], expected: str) -> None:
    assert expected in refusal(*flags)


def test_an_unknown_flag_takes_its_value_along() -> None:
    overrides, problems = parse(["--foo", "3", "--seed", "1"])
    assert [(each.path, each.value) for each in overrides] == [(("seed",), 1)]
    assert len(problems) == 1


def test_every_key_can_be_reached_by_its_flag() -> None:
    for key in dotted_keys():
        overrides, problems = parse([f"--{key}", "null"])
        assert problems == []
        assert type_at(overrides[0].path) is not None


def test_the_run_file_may_stand_anywhere_among_its_flags() -> None:
    for words in (["run.yaml", "--a.b", "-1", "--c=2"], ["--a.b", "-1", "run.yaml", "--c=2"]):
        assert split_arguments(words) == (["run.yaml"], ["--a.b", "-1", "--c=2"])


def test_flags_are_applied_to_the_values_and_stay_as_they_are() -> None:
    overrides, _ = parse(["--optim", "{lr: 1}", "--optim.eps", "2"])
    values: dict = {}
    assert apply(overrides, values) == []
    assert values == {"optim": {"lr": 1, "eps": 2}}
    assert overrides[0].value == {"lr": 1}
