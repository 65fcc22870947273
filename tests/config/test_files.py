"""A run file becomes a Run: presets below, flags above, and everything wrong with it in one message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold import Run
from fivefold.config.files import ConfigError, difference, dump_run, load_run
from fivefold.config.models import preset_names
from fivefold.config.run import Data, Model, Optim, Source
from tests.config.conftest import Load, Refusal


def test_a_file_gives_its_values_and_the_defaults(load: Load) -> None:
    run = load()
    assert (run.name, run.steps, run.data.seq_len, run.batch.micro_size) == ("tiny", 300, 256, 4)
    assert [source.weight for source in run.data.train] == [1.0, 2.0]
    assert run.optim == Optim()


def test_a_preset_lies_under_the_fields_of_the_file(load: Load) -> None:
    preset = load().model
    own = load(text="name: a\nsteps: 1\nmodel: {preset: tiny-llama, layers: 2}\ndata: {train: [{path: x}]}\n").model
    assert own == preset.model_copy(update={"layers": 2})
    assert preset.layers != 2


def test_a_section_of_the_file_lies_over_the_presets_and_null_takes_it_away(load: Load) -> None:
    text = "name: a\nsteps: 1\nmodel: {preset: tiny-deepseek, %s}\ndata: {train: [{path: x}]}\n"
    preset = load(text=text % "mtp: 1").model
    own = load(text=text % "moe: {experts: 32}").model
    assert preset.moe is not None
    assert own == preset.model_copy(update={"moe": preset.moe.model_copy(update={"experts": 32})})
    assert load(text=text % "moe: null").model.moe is None


def test_a_flag_chooses_the_preset_and_changes_inside_it(load: Load) -> None:
    model = load("--model.preset", "llama-3-405b", "--model.rope_scaling.factor", "4", "--model.vocab", "1003").model
    assert model.layers == 126
    assert model.vocab == 1003
    assert model.rope_scaling is not None
    assert (model.rope_scaling.type, model.rope_scaling.factor) == ("llama3", 4.0)


def test_a_preset_can_be_a_file_of_the_user(load: Load, folder: Path) -> None:
    (folder / "mine.yaml").write_text("layers: 3\nhidden: 48\nheads: 4\nffn: 100\n")
    assert load("--model.preset", "mine.yaml").model.layers == 3


def test_a_fault_in_a_preset_file_is_named_by_its_line(refusal: Refusal, folder: Path) -> None:
    (folder / "mine.yaml").write_text("layers: many\nhidden: 48\nheads: 4\nffn: 100\nhiden: 3\n")
    message = refusal("--model.preset", "./mine.yaml")
    assert "model.layers = many is not possible; it must be a whole number (mine.yaml line 1)" in message
    assert "`model.hiden` does not exist; did you mean `model.hidden`?" in message
    assert "(mine.yaml line 5)" in message
    (folder / "mine.yaml").write_text("preset: tiny-llama\n")
    assert "`preset` cannot stand in a preset" in refusal("--model.preset", "mine.yaml")


def test_an_unknown_preset_is_refused_with_a_suggestion_and_nothing_more(refusal: Refusal) -> None:
    message = refusal("--model.preset", "lama-3-8b")
    assert "did you mean llama-3-8b?" in message
    assert all(name in message for name in preset_names())
    assert "lacks" not in message


def test_every_preset_that_ships_makes_a_legal_run(load: Load) -> None:
    for name in preset_names():
        assert load("--model.preset", name).model.preset == name


def test_a_hugging_face_directory_gives_the_fields(load: Load, folder: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1003, "max_position_embeddings": 512}
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    model = load("--model.preset", "null", "--model.from", "hf", "--model.layers", "2").model
    assert (model.layers, model.hidden, model.key_value_heads, model.vocab, model.context) == (2, 64, 2, 1003, 512)


def test_a_model_from_nowhere_is_refused(refusal: Refusal, folder: Path) -> None:
    (folder / "empty").mkdir()
    none = ("--model.preset", "null", "--model.from")
    assert "model.from = ./gone: ./gone is neither a directory nor a hub id" in refusal(*none, "./gone")
    assert "config.json does not exist" in refusal(*none, "empty")
    assert "model.preset = tiny-llama and model.from = hf exclude each other" in refusal("--model.from", "hf")


def test_a_hub_id_without_the_hubs_client_names_the_extra(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    message = refusal("--model.preset", "null", "--model.from", "owner/name")
    assert "pip install 'fivefold[hf]'" in message


def test_a_model_without_fields_says_what_it_lacks(refusal: Refusal) -> None:
    message = refusal(text="name: a\nsteps: 1\nmodel: {layers: 2}\ndata: {train: [{path: x}]}\n")
    assert "model lacks hidden, heads, ffn; name a preset" in message


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--optim.lr", "fast"], "optim.lr = fast is not possible; it must be a number (flag --optim.lr)"),
        (["--tokens", "2T"], "tokens = 2T is not possible; it must be a number or null; write 2e12 (flag --tokens)"),
        (["--tokens", "15.6 t"], "; write 15.6e12 ("),
        (["--steps", "1.5k"], "it must be a whole number or null; write 1500 ("),
        (["--steps", "1.5"], "steps = 1.5 is not possible; it must be a whole number or null"),
        (["--steps", ".inf"], "steps = .inf is not possible"),
        (["--steps", "true"], "steps = true is not possible; it must be a whole number or null"),
        (["--optim.lr", "false"], "optim.lr = false is not possible; it must be a number"),
        (["--optim.betas", "[true, 0.9]"], "must be a list of 2 numbers"),
        (["--optim.betas", "[0.1, 0.2, 0.3]"], "optim.betas = [0.1, 0.2, 0.3] is not possible"),
        (["--checkpoint.every", "true"], "checkpoint.every = true is not possible"),
        (["--model.kv_heads", "some"], "model.kv_heads = some is not possible; it must be a whole number or auto"),
        (["--parallel.zero", "4"], "parallel.zero = 4 is not possible; it must be one of 0, 1, 2, 3"),
        (["--parallel.layers_per_stage", "[1, x]"], "it must be a list of whole numbers or one of auto, memory"),
        (["--precision.compute", "bf17"], "it must be one of fp64, fp32, bf16, fp16"),
        (["--data.document_mask", "2"], "data.document_mask = 2 is not possible; it must be true or false"),
        (["--offload", "[disk]"], "offload.0 = disk is not possible; it must be one of optimizer"),
        (["--name", "null"], "name = null is not possible; it must be text"),
        (["--name", "[a]"], "name = ['a'] is not possible; it must be text"),
        (["--optim", "3"], "optim = 3 is not possible; it must be a section with name, lr"),
        (["--model", "tiny-llama"], "model = tiny-llama is not possible; it must be a section with preset"),
        (["--data.train", "data/a"], "data.train = data/a is not possible; it must be a list of sections with path"),
        (["--data.train", "[{weight: 2}]"], "data.train.0 lacks path (path: a path)"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_what_is_allowed(
    refusal: Refusal, flags: list[str], expected: str
) -> None:
    assert expected in refusal(*flags)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim: {learning_rate: 1}", "`optim.learning_rate` does not exist; optim has name, lr, betas"),
        ("optim: {weight_dekay: 1}", "`optim.weight_dekay` does not exist; did you mean `optim.weight_decay`?"),
        ("lr: 1", "`lr` does not exist; did you mean `optim.lr`? the run file has name, out"),
        ("optmi: {lr: 1}", "`optmi` does not exist; did you mean `optim`?"),
        ("optmi:\n  lr: 1", "`optmi` does not exist; did you mean `optim`?"),
        ("zzz:", "`zzz` does not exist; the run file has name, out"),
        ("validation: {every: 1}", "`validation` does not exist; did you mean `validate`?"),
        ("parallel: {1: 2}", "`parallel.1` does not exist; parallel has tp"),
    ],
)
def test_an_unknown_key_gets_its_line_and_a_suggestion(refusal: Refusal, text: str, expected: str) -> None:
    message = refusal(
        text=f"name: a\nsteps: 1\nmodel: {{preset: tiny-llama}}\ndata: {{train: [{{path: x}}]}}\n{text}\n"
    )
    assert expected in message
    assert "run.yaml line 5)" in message


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--zzz"], "`--zzz` does not exist; the run file has name, out"),
        (["--zzz", "3"], "`--zzz` does not exist; the run file has name, out"),
        (["--optim.zzz=3"], "`--optim.zzz` does not exist; optim has name, lr"),
        (["--modell.layers", "3"], "`--modell.layers` does not exist; did you mean `--model.layers`?"),
    ],
)
def test_an_unknown_flag_is_refused_with_or_without_a_value(refusal: Refusal, flags: list[str], expected: str) -> None:
    message = refusal(*flags)
    assert expected in message
    assert "things are wrong" not in message


def test_all_keys_and_types_that_are_wrong_come_in_one_message(refusal: Refusal) -> None:
    text = "nam: a\nsteps: 1.5\nmodel: {preset: tiny-llama, heads: x}\ndata: {train: [{pth: x}]}\n"
    message = refusal("--optim.lr", "fast", "--foo", "3", text=text)
    assert "8 things are wrong" in message
    for part in ("--foo", "`nam`", "`data.train.0.pth`", "steps = 1.5", "model.heads = x", "optim.lr = fast"):
        assert part in message
    assert "the run file lacks name (name: text)" in message
    assert "data.train.0 lacks path" in message


def test_all_broken_rules_come_in_one_message(load: Load, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load("--optim.clip", "0", "--optim.lr", "-1", "--batch.global_size", "7", "--name", "a/b")
    assert len(caught.value.problems) == 4
    assert str(caught.value).startswith(f"{folder / 'run.yaml'}: 4 things are wrong\n  - ")


def test_an_empty_file_points_to_init(refusal: Refusal, folder: Path) -> None:
    assert "fivefold init > run.yaml" in refusal(text="")
    with pytest.raises(ConfigError, match=r"gone\.yaml: no such file.*fivefold init"):
        load_run(folder / "gone.yaml")


def test_an_empty_section_is_its_default(load: Load) -> None:
    text = (
        "name: a\nsteps: 1\nmodel: {preset: tiny-llama}\ndata: {train: [{path: x}], validation: }\noptim:\noffload:\n"
    )
    run = load(text=text)
    assert run.optim == Optim()
    assert run.data.validation == []


def test_a_name_that_looks_like_a_number_is_text(load: Load) -> None:
    assert load("--name", "7").name == "7"
    assert load("--name", "1e3").name == "1e3"
    assert load("--name", "2024-01-01").name == "2024-01-01"
    assert load("--data.train.0.path", "007").data.train[0].path == Path("007")


def test_a_whole_number_may_be_written_as_a_float(load: Load) -> None:
    assert load("--steps", "1e3").steps == 1000
    assert load("--model.vocab", "1e3").model.vocab == 1000


def test_a_run_written_out_is_read_back_equal(load: Load, folder: Path) -> None:
    flags = ["--model.preset", "llama-3-405b", "--steps", "null", "--tokens", "15e9", "--optim.clip", ".inf"]
    for run in (load(), load(*flags), load("--checkpoint.every", "2h", "--model.options", "{a: [1, off], b: '1e3'}")):
        (folder / "again.yaml").write_text(dump_run(run))
        assert Run.load(folder / "again.yaml") == run


def test_a_run_written_out_needs_its_preset_no_more(load: Load, folder: Path) -> None:
    (folder / "mine.yaml").write_text("layers: 3\nhidden: 48\nheads: 4\nffn: 100\n")
    run = load("--model.preset", "mine.yaml")
    (folder / "again.yaml").write_text(dump_run(run))
    (folder / "mine.yaml").unlink()
    assert Run.load(folder / "again.yaml") == run
    with pytest.raises(ConfigError, match=r"model\.preset = tiny-bloom would change nothing"):
        Run.load(folder / "again.yaml", ["--model.preset", "tiny-bloom"])


WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@settings(deadline=None, max_examples=30)
@given(
    tokenizer=WORDS,
    path=WORDS,
    lr=st.floats(0, 1e300),
    clip=st.none() | st.floats(min_value=1e-300, exclude_min=True),
    seed=st.integers(0, 2**63 - 1),
    options=st.dictionaries(WORDS, st.none() | st.booleans() | st.integers() | WORDS, max_size=3),
)
def test_any_run_written_out_is_read_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: str,
    path: str,
    lr: float,
    clip: float,
    seed: int,
    options: dict,
) -> None:
    run = Run(
        name="tiny",
        steps=3,
        seed=seed,
        model=Model(layers=1, hidden=8, heads=2, ffn=8, options=options),
        data=Data(train=[Source(path=Path(path))], tokenizer=tokenizer),
        optim=Optim(lr=lr, clip=clip),
    )
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(dump_run(run), encoding="utf-8")
    assert Run.load(file) == run


def test_the_difference_of_two_runs_names_keys_and_values(load: Load) -> None:
    a = load()
    b = load("--optim.lr", "1e-3", "--data.train.1.weight", "5", "--model.rope_scaling", "{type: linear, factor: 2}")
    assert difference(a, a) == []
    assert difference(a, b) == [
        ("model.rope_scaling", None, difference(a, b)[0][2]),
        ("data.train.1.weight", 2.0, 5.0),
        ("optim.lr", 3e-4, 1e-3),
    ]
    assert difference(a, load("--data.train", "[{path: data/a}]"))[0][0] == "data.train"
