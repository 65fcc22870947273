"""The reference page and the template of `init` are made from the classes, and are never behind them."""

from __future__ import annotations

from pathlib import Path

from fivefold import Run
from fivefold.config.keys import dotted_keys, fields, section_in, type_at
from fivefold.config.reference import page, plain_text
from fivefold.config.rules import check
from fivefold.config.run import Parallel
from fivefold.config.run import Run as RunClass
from fivefold.config.sentences import field_sentences
from fivefold.config.template import COMMENT_COLUMN, EXAMPLE, WIDTH, template
from fivefold.config.yaml12 import read_text

PAGE = Path(__file__).parents[2] / "docs" / "run-file.md"


def test_the_page_in_docs_is_what_the_classes_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m fivefold.config.reference > docs/run-file.md"


def test_the_page_has_a_row_for_every_key() -> None:
    rows = {line.split("`")[1] for line in page().splitlines() if line.startswith("| `")}
    values = [key for key in dotted_keys() if not section_in(type_at(tuple(key.split("."))))]
    assert {key.rpartition(".")[2] for key in values} <= rows


def test_every_field_has_a_sentence_under_it() -> None:
    sections = [RunClass, *filter(None, (section_in(type_at(tuple(k.split(".")))) for k in dotted_keys()))]
    bare = [f"{each.__name__}.{key}" for each in sections for key, text in field_sentences(each).items() if not text]
    assert bare == []
    assert field_sentences(Parallel)["zero"].startswith("0 replicates all")


def test_a_value_is_shown_as_it_is_written() -> None:
    values = {"a": None, "b": True, "c": 1e-8, "d": (0.9, 0.95), "e": {}, "f": "off", "g": [], "h": 1e-5}
    assert [plain_text(value) for value in values.values()] == [
        "null",
        "true",
        "1e-8",
        "[0.9, 0.95]",
        "{}",
        "off",
        "[]",
        "1e-5",
    ]


def test_the_template_is_a_legal_run_with_the_values_of_the_example(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(template())
    run = Run.load(tmp_path / "run.yaml")
    assert check(run) == []
    assert check(run, world=2) == []
    assert (run.name, run.steps, run.model.preset, run.optim.lr) == ("tiny", 300, "tiny-llama", EXAMPLE["optim.lr"])
    assert str(run.data.train[0].path) == "data/stdlib"
    assert run.data.validation[0].name == "stdlib"


def test_the_template_writes_every_key_but_the_architecture_and_what_is_of_experts(tmp_path: Path) -> None:
    value = read_text(template(), "template").value
    assert set(fields(RunClass)) - set(value) == {"loss", "routing"}
    assert template().splitlines()[-1].startswith("# loss and routing are about experts")
    for key, info in fields(RunClass).items():
        inner = section_in(info.annotation)
        if inner is not None and key in value and key != "model":
            assert set(value[key]) == set(fields(inner))


def test_the_template_says_the_defaults_where_the_example_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(template())
    run = Run.load(tmp_path / "run.yaml")
    for name in ("cluster", "parallel", "precision", "recompute", "checkpoint", "log"):
        assert getattr(run, name) == RunClass.model_fields[name].default


def test_every_line_of_the_template_has_its_comment_in_one_column() -> None:
    lines = [line for line in template().splitlines() if line and not line.lstrip().startswith("#")]
    assert all(line.index("#") >= COMMENT_COLUMN for line in lines)
    assert all(len(line) <= WIDTH for line in template().splitlines())
