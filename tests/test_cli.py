"""The commands: what they print, where errors go, and with which code they exit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import fivefold
from fivefold.cli import commands
from fivefold.config.models import preset_names
from fivefold.errors import RunError, UserError
from fivefold.train.options import TrainOptions

RUN_FILE = """\
name: tiny
steps: 300
model: {preset: tiny-llama}
data:
  train: [{path: data/a}]
  seq_len: 256
batch: {global_size: 8, micro_size: 4}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: empty but for run.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(commands, words, prog_name="fivefold")


def process(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fivefold", *words], capture_output=True, text=True, check=False, **more
    )


def test_help_names_the_commands_in_the_order_of_use() -> None:
    text = call("--help").stdout
    places = [
        text.index(f"\n  {name} ")
        for name in ("init", "presets", "check", "plan", "data", "train", "export", "generate")
    ]
    assert places == sorted(places)


def test_version_is_that_of_the_package() -> None:
    assert process("--version").stdout == f"fivefold, version {fivefold.__version__}\n"


def test_init_writes_a_run_file_that_check_accepts(folder: Path) -> None:
    written = process("init")
    assert written.returncode == 0
    (folder / "new.yaml").write_text(written.stdout)
    checked = process("check", "new.yaml")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.startswith("new.yaml is legal: run tiny\n")


def test_presets_lists_every_model_with_its_numbers() -> None:
    lines = call("presets").stdout.splitlines()
    assert lines[0].split()[:4] == ["name", "parameters", "active", "layers"]
    assert {line.split()[0] for line in lines[1:-1]} == set(preset_names())
    assert next(line for line in lines if line.startswith("llama-3-8b ")).split()[1:7] == [
        "8.03B",
        "8.03B",
        "32",
        "4096",
        "32/8",
        "8192",
    ]


def test_presets_as_json_has_exact_numbers() -> None:
    rows = {row["name"]: row for row in json.loads(call("presets", "--json").stdout)}
    assert rows["llama-3-8b"]["parameters"] == 8_030_261_248
    assert rows["llama-3-8b"]["parameters_a_token"] == 0
    assert rows["tiny-llama"]["parameters_a_token"] == 512
    assert (rows["mixtral-8x7b"]["parameters"], rows["mixtral-8x7b"]["active"]) == (46_702_792_704, 12_879_925_248)
    assert "meta-llama/Meta-Llama-3-8B" in rows["llama-3-8b"]["source"]


def test_a_preset_by_name_is_printed_as_its_file() -> None:
    assert "layers: 32\n" in call("presets", "llama-3-8b").stdout
    assert json.loads(call("presets", "llama-3-8b", "--json").stdout)["layers"] == 32
    refused = call("presets", "lama-3-8b")
    assert refused.exit_code == 2
    assert "did you mean llama-3-8b?" in refused.stderr


def test_check_says_what_a_run_comes_to(folder: Path) -> None:
    result = call("check", "run.yaml", "--model.vocab", "8192")
    assert result.exit_code == 0
    assert "tiny-llama: 6,555,904 parameters, vocabulary 8,192" in result.stdout
    assert "300 steps = 614,400 tokens" in result.stdout
    assert "8 sequences x 256 = 2,048 tokens a step" in result.stdout
    assert "note: data/a does not exist yet" in result.stdout


def test_check_takes_the_vocabulary_from_the_data_that_is_there(folder: Path) -> None:
    (folder / "data" / "a").mkdir(parents=True)
    (folder / "data" / "a" / "dataset.json").write_text('{"vocab": 8192}')
    found = json.loads(call("check", "run.yaml", "--json").stdout)
    assert (found["parameters"], found["vocabulary"], found["notes"]) == (6_555_904, 8192, [])


def test_check_notes_an_architecture_that_no_export_can_say(folder: Path) -> None:
    assert "cannot be exported" in call("check", "run.yaml", "--model.norm", "layernorm").stdout
    assert "cannot be exported" not in call("check", "run.yaml").stdout


def test_check_as_json_leaves_standard_output_to_json(folder: Path) -> None:
    assert json.loads(process("check", "run.yaml", "--json").stdout)["tokens"] == 614_400
    refused = process("check", "run.yaml", "--json", "--optim.clip", "-1")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_a_bad_run_file_is_one_message_on_standard_error(folder: Path) -> None:
    refused = process("check", "run.yaml", "--optim.clip", "-1", "--batch.global_size=7")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("Error: run.yaml: 2 things are wrong\n  - ")
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "run.yaml is empty"),
        (b"\x00\x01\x02\xff", "run.yaml is not UTF-8 text: byte 3 is 0xff"),
        (b"name: tiny\nmodel: {preset: tiny-ll", "run.yaml line 2 is not valid YAML"),
        (b"- a\n", "run.yaml holds a list"),
        (b"name: a\nname: b\n", "`name` is given twice, in line 1 and in line 2"),
    ],
)
def test_a_damaged_run_file_exits_with_2(folder: Path, content: bytes, expected: str) -> None:
    (folder / "run.yaml").write_bytes(content)
    refused = call("check", "run.yaml")
    assert refused.exit_code == 2
    assert expected in refused.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["check"], "one run file is needed, and none was given"),
        (["check", "a.yaml", "b.yaml"], "2 were given: a.yaml, b.yaml"),
        (["check", "gone.yaml"], "gone.yaml: no such file"),
        (["check", "run.yaml", "--optim.lr"], "`--optim.lr` needs a value"),
        (["check", "run.yaml", "--optim.lrr", "1"], "did you mean `--optim.lr`?"),
        (["plan", "run.yaml"], "how many ranks there are is not known; give --gpus N"),
        (["plan", "run.yaml", "--ranks", "--build-rank", "0"], "give --ranks (what each rank is) or --build-rank N"),
        (["plan", "run.yaml", "--build-rank", "one"], "'one' is not a valid integer"),
        (["plan", "--ranks"], "one run file is needed, and none was given"),
        (["plan", "run.yaml", "--ranks"], "how many ranks there are is not known; give --gpus N"),
        (
            ["plan", "run.yaml", "--ranks", "--gpus", "6", "--parallel.tp", "4", "--batch.global_size", "24"],
            "use parallel.tp 1 or 2, or 4 or 8 ranks",
        ),
        (
            ["plan", "run.yaml", "--build-rank", "2", "--gpus", "2"],
            "there is no rank 2: the ranks of this run are 0 to 1",
        ),
        (["plan", "run.yaml", "--build-rank", "-1", "--gpus", "2"], "there is no rank -1: the ranks"),
        (["train", "run.yaml", "--restart", "--fork", "b"], "--restart and --fork exclude each other"),
        (["train", "run.yaml", "--nproc", "0"], "0 is not in the range x>=1"),
        (["train", "run.yaml", "--resume", "maybe"], "'maybe' is not one of 'auto', 'never', 'must'"),
        (["data", "build", "x"], "Missing option '--out'"),
        (["data", "build", "x", "--out", "y"], "--train-tokenizer"),
        (["export", "runs/a"], "Missing option '--to'"),
        (["nonsense"], "No such command 'nonsense'"),
    ],
)
def test_a_wrong_command_line_exits_with_2(folder: Path, words: list[str], expected: str, fake_rooms: Calls) -> None:
    refused = call(*words)
    assert refused.exit_code == 2, refused.output
    assert expected in refused.stderr
    assert fake_rooms.made == []


def test_the_run_file_may_stand_behind_its_flags(folder: Path) -> None:
    result = call("check", "--optim.clip", "-1", "--steps=5", "run.yaml", "--json")
    assert "optim.clip = -1.0" in result.stderr
    assert json.loads(call("check", "--seed", "3", "run.yaml", "--steps=5", "--json").stdout)["steps"] == 5


@pytest.mark.parametrize("command", ["train", "check", "plan"])
def test_help_says_that_every_key_is_a_flag(command: str) -> None:
    text = " ".join(call(command, "--help").stdout.split())
    assert "Every key of the run file is a flag" in text
    for key in ("--optim.lr,", "--data.train.0.weight,", "--model.rope_scaling.factor,", "--log.wandb"):
        assert key in text


def test_plan_lists_the_ranks_of_a_run_that_this_version_does_not_train(folder: Path) -> None:
    layout = ["--gpus", "8", "--parallel.pp", "2", "--parallel.tp", "2", "--model.vocab", "1003"]
    layout += ["--precision.linear", "fp4"]
    listed = call("plan", "run.yaml", "--ranks", *layout)
    assert (listed.exit_code, listed.stderr) == (0, "")
    assert listed.stdout.startswith("run tiny: 8 ranks = pp 2 x dp 2 x cp 1 x tp 2\n")
    assert "note: precision.linear = fp4: this version does not run 8-bit and 4-bit linear layers" in listed.stdout
    found = json.loads(call("plan", "run.yaml", "--ranks", "--json", *layout).stdout)
    assert (found["world"], len(found["ranks"])) == (8, 8)
    refused = call("check", "run.yaml", *layout)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "precision.linear = fp4: this version does not run 8-bit and 4-bit linear layers" in refused.stderr


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "messages"), [(6, 2, 4, 2), (6, 6, 4, 2), (6, 3, 2, 1), (5, 5, 2, 2), (12, 3, 3, 0)]
)
@pytest.mark.parametrize("command", [["check"], ["plan", "--ranks"], ["plan", "--build-rank", "0"]], ids=str)
def test_heads_that_tp_cannot_split_are_refused_by_every_command(
    folder: Path, command: list[str], heads: int, kv_heads: int, tp: int, messages: int
) -> None:
    """As many messages as broken rules: 5 heads cannot be split, and neither can the 5 key/value heads."""
    sizes = ["--model.hidden", str(16 * heads), "--model.heads", str(heads), "--model.kv_heads", str(kv_heads)]
    layout = ["--model.ffn=48", "--model.vocab=1003", "--data.seq_len=240", f"--parallel.tp={tp}", f"--gpus={tp}"]
    result = call(*command, "run.yaml", *sizes, *layout)
    assert result.exit_code == (2 if messages else 0)
    assert result.stderr.count(f"over parallel.tp = {tp}; use parallel.tp") == messages


def test_plan_builds_a_rank_and_leaves_standard_output_to_json(folder: Path) -> None:
    layout = ["--gpus", "8", "--parallel.pp", "2", "--parallel.tp", "2", "--model.vocab", "1003"]
    built = process("plan", "run.yaml", "--build-rank", "5", "--json", *layout)
    assert (built.returncode, built.stderr) == (0, "")
    found = json.loads(built.stdout)
    assert found["role"] == {"pp": 1, "replicate": 0, "shard": 0, "cp": 0, "tp": 1}
    assert found["layers"] == [2, 3]
    assert "rank 5 stands at pp 1" in call("plan", "run.yaml", "--build-rank", "5", *layout).stdout


def test_data_build_makes_both_sets(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(8):
        (folder / "texts" / f"{number}.txt").write_text(f"document {number} says something of its own\n" * 20)
    words = ["data", "build", "texts", "--out", "data/a", "--train-tokenizer", "300", "--val-fraction", "0.3"]
    built = call(*words, "--workers", "1", "--no-progress")
    assert built.exit_code == 0, built.output
    assert (folder / "data" / "a" / "dataset.json").exists()
    assert (folder / "data" / "a-val" / "dataset.json").exists()
    assert "documents read 8 = written 8 + skipped 0" in built.stdout
    assert json.loads(call("check", "run.yaml", "--json").stdout)["vocabulary"] <= 300


@dataclass
class Calls:
    """What the commands called, in place of the rooms that would train, export and generate."""

    made: list[tuple[str, tuple, dict]]
    raises: BaseException | None = None

    def record(self, name: str, result: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.made.append((name, args, kwargs))
            if self.raises is not None:
                raise self.raises
            return result

        return called


@pytest.fixture
def fake_rooms(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Rooms that only record how they were called."""
    calls = Calls([])
    start: Any = types.ModuleType("fivefold.train.start")
    start.start_training = calls.record("start_training", 0)
    use: Any = types.ModuleType("fivefold.train.use")
    use.export_run = calls.record("export_run", None)
    use.generate_text = calls.record("generate_text", "once upon a time")
    monkeypatch.setitem(sys.modules, "fivefold.train.start", start)
    monkeypatch.setitem(sys.modules, "fivefold.train.use", use)
    return calls


def test_train_hands_on_the_file_the_flags_and_its_own_options(folder: Path, fake_rooms: Calls) -> None:
    words = ["--optim.lr", "1e-3", "run.yaml", "--nproc", "2", "--optim.clip", "-1e-3", "--stop-after=5", "--seed=7"]
    assert call("train", *words).exit_code == 0
    assert fake_rooms.made == [
        (
            "start_training",
            (
                Path("run.yaml"),
                ["--optim.lr", "1e-3", "--optim.clip", "-1e-3", "--seed=7"],
                TrainOptions(stop_after=5, nproc=2),
            ),
            {},
        )
    ]


def test_export_and_generate_hand_on_their_options(folder: Path, fake_rooms: Calls) -> None:
    assert call("export", "runs/a", "--to", "hf", "--dtype", "fp32", "--step", "10").exit_code == 0
    result = call("generate", "runs/a", "def main(", "--max-tokens", "5", "--temperature", "0", "--top-p", "0.9")
    assert result.stdout == "once upon a time\n"
    assert fake_rooms.made == [
        ("export_run", (Path("runs/a"), Path("hf")), {"dtype": "fp32", "step": 10}),
        (
            "generate_text",
            (Path("runs/a"), "def main("),
            {"max_tokens": 5, "temperature": 0, "top_k": None, "top_p": 0.9, "seed": 0, "step": None},
        ),
    ]


@pytest.mark.parametrize(("error", "code"), [(UserError("no such run"), 2), (RunError("a worker died"), 1)])
def test_an_error_of_ours_is_its_message_and_its_code(
    folder: Path, fake_rooms: Calls, error: Exception, code: int
) -> None:
    fake_rooms.raises = error
    failed = call("train", "run.yaml")
    assert (failed.exit_code, failed.stdout, failed.stderr) == (code, "", f"Error: {error}\n")


def test_ctrl_c_exits_with_130(folder: Path, fake_rooms: Calls) -> None:
    fake_rooms.raises = KeyboardInterrupt()
    stopped = call("train", "run.yaml")
    assert (stopped.exit_code, stopped.stderr) == (130, "interrupted\n")


def test_an_unexpected_exception_shows_where_it_came_from(folder: Path, fake_rooms: Calls) -> None:
    fake_rooms.raises = ZeroDivisionError("oh")
    failed = call("train", "run.yaml")
    assert failed.exit_code == 1
    assert isinstance(failed.exception, ZeroDivisionError)


def test_ctrl_c_from_a_terminal_leaves_no_traceback(folder: Path) -> None:
    code = (
        "import os, signal, sys, types; start = types.ModuleType('fivefold.train.start')\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "start.start_training = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.modules['fivefold.train.start'] = start\n"
        "from fivefold.cli import main; main(['train', 'run.yaml'])"
    )
    stopped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (stopped.returncode, stopped.stderr) == (128 + signal.SIGINT, "interrupted\n")


def test_a_pipe_that_closes_early_is_no_error_with_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        ran = subprocess.run(
            [sys.executable, "-m", "fivefold", "init"], stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert "Traceback" not in ran.stderr
