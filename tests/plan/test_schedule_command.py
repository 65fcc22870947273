"""`fivefold schedule`: what it prints and writes, which times it takes, and what it refuses in one message."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fivefold.cli import commands
from fivefold.errors import UserError
from fivefold.pipeline.measured import PIPELINE_FILE, Measured
from fivefold.pipeline.named import make_schedule
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.text import from_csv, to_csv
from fivefold.pipeline.times import Times
from fivefold.plan.schedule import Asked, answer
from fivefold.plan.schedule_times import RunTimes


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, empty; a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(commands, ["schedule", *words], prog_name="fivefold")


def printed_json(*words: str) -> dict[str, Any]:
    result = call(*words, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def measure(folder: Path, name: str, ranks: int, microbatches: int, slower: float = 1.0) -> Measured:
    """Leave in `folder` what a run of this schedule would have measured, whose odd stages take `slower` as long."""
    schedule = make_schedule(name, ranks, microbatches)
    factors = tuple(slower if stage % 2 else 1.0 for stage in range(schedule.stages))
    times = Times(factors, tuple(2 * factor for factor in factors), factors)
    spans = [
        [(str(action), 100.0 + start, 100.0 + end) for action, start, end in row]
        for row in simulate(schedule, times).spans
    ]
    measured = Measured(to_csv(schedule), name, 12, spans, transfer_s=0.25, tokens=4096)
    folder.mkdir(parents=True)
    measured.save(folder / PIPELINE_FILE)
    return measured


def test_it_prints_the_timeline_and_its_numbers() -> None:
    result = call("1f1b", "--pp", "2", "--microbatches", "3")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "1f1b: 2 ranks, 2 stages, 3 microbatches; a rank's F 1, I 1, W 1 a microbatch, 0 a hop"
    assert [len(line) for line in lines[2:4]] == [80, 80]
    assert lines[2].startswith("0 F0----F1-----.............B0-----------F2----")
    assert lines[4:8] == [
        "makespan                  12",
        "longest rank              12",
        "bubble                    0.2500",
        "peak activations by rank  2 1",
    ]


def test_json_holds_the_schedule_and_what_it_comes_to() -> None:
    found = printed_json("zb-h1", "--pp", "4", "--microbatches", "8")
    schedule = make_schedule("zb-h1", 4, 8)
    timeline = simulate(schedule, Times.uniform(4, 1.0, 1.0, 1.0))
    assert {key: found[key] for key in ("name", "pp", "chunks", "microbatches", "stages", "placement")} == {
        "name": "zb-h1",
        "pp": 4,
        "chunks": 1,
        "microbatches": 8,
        "stages": 4,
        "placement": [0, 1, 2, 3],
    }
    assert found["bubble"] == pytest.approx(3 / (3 * 8 + 3), abs=1e-12)
    assert (found["makespan"], found["cost"], found["peak_activations"]) == (27, 27, list(timeline.peak))
    assert found["actions"] == [[str(action) for action in actions] for actions in schedule.actions]
    assert found["spans"][3][0] == [3, 4]
    assert found["times"] == {
        "forward": [1] * 4,
        "input": [1] * 4,
        "weight": [1] * 4,
        "latency": 0,
        "transfer": 0,
        "unit": None,
    }


def test_times_are_those_of_a_rank_and_its_chunks_share_them() -> None:
    one = printed_json("1f1b", "--pp", "2", "--microbatches", "4", "--times", "3,2,1,0.5")
    assert (one["times"]["forward"], one["times"]["latency"]) == ([3, 3], 0.5)
    three = printed_json("interleaved", "--pp", "2", "--microbatches", "4", "--chunks", "3", "--times", "3,2,1,0.5")
    assert three["times"]["forward"] == [1] * 6
    assert three["times"]["weight"] == [pytest.approx(1 / 3)] * 6
    assert three["times"]["latency"] == 0.5


def test_a_schedule_has_its_own_number_of_chunks_unless_told() -> None:
    assert printed_json("zb-v", "--pp", "2", "--microbatches", "4")["chunks"] == 2
    assert printed_json("interleaved", "--pp", "2", "--microbatches", "4")["chunks"] == 1


def test_a_schedule_goes_through_a_csv_file_and_back() -> None:
    made = printed_json("dualpipe-v", "--pp", "2", "--microbatches", "5", "--csv", "mine.csv")
    read = printed_json("mine.csv")
    assert read["name"] == "mine.csv"
    assert {**read, "name": "dualpipe-v"} == made
    assert from_csv(Path("mine.csv").read_text(), "dualpipe-v") == make_schedule("dualpipe-v", 2, 5, 2)
    same = printed_json("mine.csv", "--pp", "2", "--microbatches", "5", "--chunks", "2")
    assert same == read


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(folder: Path) -> None:
    Path("mine.csv").write_text("old")
    assert call("gpipe", "--pp", "1", "--microbatches", "2", "--csv", "mine.csv").exit_code == 0
    assert Path("mine.csv").read_text() == "0F0,0F1,0B0,0B1\n"
    assert [each.name for each in folder.iterdir()] == ["mine.csv"]


def test_a_link_stays_a_link_and_its_file_is_written() -> None:
    Path("real.csv").write_text("old")
    Path("link.csv").symlink_to("real.csv")
    call("gpipe", "--pp", "1", "--microbatches", "1", "--csv", "link.csv")
    assert Path("link.csv").is_symlink()
    assert Path("real.csv").read_text() == "0F0,0B0\n"


def test_the_page_and_the_picture_alone_are_told_apart_by_the_files_name() -> None:
    for name, begins in (("a.html", "<!doctype html>"), ("a.svg", "<svg ")):
        assert call("zb-v", "--pp", "2", "--microbatches", "4", "--html", name).exit_code == 0
        assert Path(name).read_text().startswith(begins)


@pytest.mark.parametrize("run", ["tiny", "runs/tiny"])
def test_the_times_of_a_run_are_used_and_drawn_beside(folder: Path, run: str) -> None:
    measured = measure(folder / "runs" / "tiny", "1f1b", 2, 4, slower=3.0)
    found = printed_json("1f1b", "--pp", "2", "--microbatches", "4", "--times", run)
    # a full backward of 3 and 9 seconds is split in halves
    assert found["times"] == {
        "forward": [1, 3],
        "input": [1.5, 4.5],
        "weight": [1.5, 4.5],
        "latency": 0,
        "transfer": 0.25,
        "unit": "s",
    }
    assert (found["measured"]["step"], found["measured"]["run"]) == (12, "runs/tiny")
    assert found["measured"]["bubble"] == pytest.approx(measured.bubble, abs=1e-12)
    assert found["measured"]["spans"][0][0] == [0, 1]
    text = call("1f1b", "--pp", "2", "--microbatches", "4", "--times", run, "--html", "a.html").stdout
    assert "times measured in step 12 of runs/tiny" in text.splitlines()[0]
    assert text.index("1f1b, simulated") < text.index("1f1b, step 12 of runs/tiny, measured")
    assert "1f1b, step 12 of runs/tiny, measured" in Path("a.html").read_text()


def test_times_of_another_number_of_stages_are_spread_over_the_model(folder: Path) -> None:
    measure(folder / "run", "1f1b", 2, 4, slower=3.0)
    asked = Asked("zb-v", "run", pp=2, microbatches=4)
    assert answer(asked).times == Times(
        (0.5, 0.5, 1.5, 1.5), (0.75, 0.75, 2.25, 2.25), (0.75, 0.75, 2.25, 2.25), 0.0, 0.25
    )
    source = answer(asked).source
    assert isinstance(source, RunTimes)
    assert source.says(4).endswith("of run, of 2 stages, spread evenly over 4")
    three = answer(Asked("1f1b", "run", pp=3, microbatches=4)).times
    assert three.forward == pytest.approx((2 / 3, 1 / 3 + 1, 2))


def test_a_limit_that_the_schedule_keeps_is_said() -> None:
    result = call("1f1b", "--pp", "2", "--microbatches", "4", "--memory", "2")
    assert result.exit_code == 0
    assert "within --memory           2" in result.stdout


def test_a_limit_that_the_schedule_does_not_keep_is_said_and_exits_with_3() -> None:
    result = call("gpipe", "--pp", "2", "--microbatches", "4", "--memory", "3.5", "--json")
    assert result.exit_code == 3
    assert "gpipe does not fit: rank 0 holds 4 activations, more than --memory 3.5" in result.stderr
    found = json.loads(result.stdout)
    assert (found["memory"], found["fits"]) == (3.5, False)


def test_auto_keeps_the_limit_and_takes_the_times_into_account() -> None:
    words = ("auto", "--pp", "4", "--microbatches", "12", "--memory")
    loose, tight = printed_json(*words, "8"), printed_json(*words, "3")
    assert (max(loose["peak_activations"]) <= 8, max(tight["peak_activations"]) <= 3) == (True, True)
    assert loose["bubble"] < tight["bubble"]
    times = ("--times", "1,2,0.5,0.3")
    adapted, other = (
        printed_json(*words, "4", *times),
        printed_json("zb-h1", "--pp", "4", "--microbatches", "12", *times),
    )
    assert adapted["bubble"] <= other["bubble"]
    assert adapted["actions"] != printed_json(*words, "4")["actions"]


PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_the_pages_example_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "106")
    example = re.search(r"```text\n\$ fivefold schedule (.*)\n([^`]*)```", PAGE.read_text(encoding="utf-8"))
    assert example is not None
    assert call(*example[1].split()).stdout == example[2]


def test_the_pages_table_of_costs_is_what_the_command_prints() -> None:
    rows = re.findall(r"^\| `(.*)` \| ([\d.]+) \| ([\d.]+) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 9
    for words, makespan, bubble, peaks in rows:
        found = printed_json(*words.split(), "--pp", "8", "--microbatches", "32")
        assert (found["makespan"], f"{found['bubble']:.4f}") == (float(makespan), bubble), words
        first, last = found["peak_activations"][0], found["peak_activations"][-1]
        assert peaks == (f"{first:g}" if {first} == set(found["peak_activations"]) else f"{first:g} to {last:g}"), words


PLAIN = ("--pp", "2", "--microbatches", "4")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("zb-v9", *PLAIN), "did you mean zb-v? known are 1f1b, auto, dualpipe-v, gpipe"),
        (("1f1b", "--pp", "0", "--microbatches", "4"), "'--pp': 0 is not in the range"),
        (("1f1b", "--pp", "2", "--microbatches", "0"), "'--microbatches': 0 is not in the range"),
        (("1f1b", "--microbatches", "4"), "schedule 1f1b: give --pp and --microbatches"),
        (("1f1b", *PLAIN, "--chunks", "2"), "1f1b has 1 chunk"),
        (("zb-v", *PLAIN, "--chunks", "3"), "zb-v has 2 chunks a rank, not 3"),
        (("dualpipe-v", "--pp", "4", "--microbatches", "7"), "takes at least 8 microbatches"),
        (("auto", *PLAIN, "--memory", "0.5"), "a limit of 0.5 activations is too small"),
        (("1f1b", *PLAIN, "--times", "1,1,1"), "--times 1,1,1 has 3 numbers, and four are needed"),
        (("1f1b", *PLAIN, "--times", "1,one,1,0"), "--times 1,one,1,0 is no run"),
        (("1f1b", *PLAIN, "--times", "1"), "--times 1 is no run (1 and runs/1 are no folders)"),
        (("1f1b", *PLAIN, "--times", ""), "--times  is no run"),
        (("1f1b", *PLAIN, "--times", "1,nan,1,0"), "times are not negative and at most 1e+100"),
        (("1f1b", *PLAIN, "--times", "1,1,-1,0"), "times are not negative and at most 1e+100"),
        (("1f1b", *PLAIN, "--times", "1e308,1,1,0"), "times are not negative and at most 1e+100"),
        (("1f1b", *PLAIN, "--times", "5e-324,0,0,0"), "F, I and W are not all 0, or all below 1e-100"),
        (("1f1b", *PLAIN, "--times", "0,0,0,1"), "F, I and W are not all 0"),
        (("1f1b", *PLAIN, "--times", "empty"), "empty has no pipeline.json: no step of a pipeline was measured in it"),
        (("1f1b", *PLAIN, "--times", "bad"), "bad/pipeline.json is damaged ("),
        (("1f1b", *PLAIN, "--memory", "0"), "'--memory': 0.0 is not in the range"),
        (("1f1b", *PLAIN, "--memory", "nan"), "--memory nan"),
        (("1f1b", *PLAIN, "--memory", "inf"), "--memory inf"),
        (("none.csv",), "cannot read none.csv: No such file"),
        (("bytes.csv",), "bytes.csv is no text"),
        (("empty.csv",), "empty.csv: no actions"),
        (("word.csv",), "word.csv, line 1, cell 2: 'word' is no action"),
        (("lost.csv",), "0B1 is missing"),
        (("twice.csv",), "0F1 (rank 0, place 2) is doubled"),
        (("circle.csv",), "circle.csv cannot run:\n  0B0 (rank 0, place 1) waits for 1B0"),
        (("good.csv", "--pp", "3"), "--pp 3 contradicts good.csv, which has 2; leave --pp out"),
        (("good.csv", "--microbatches", "1"), "--microbatches 1 contradicts good.csv, which has 2"),
        (("good.csv", "--chunks", "2"), "--chunks 2 contradicts good.csv, which has 1"),
        (("1f1b", *PLAIN, "--html", "none/a.html"), "cannot write none/a.html: there is no folder none"),
        (("1f1b", *PLAIN, "--csv", "empty"), "cannot write empty: it is a folder"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(words: tuple[str, ...], said: str) -> None:
    Path("empty").mkdir()
    Path("bad").mkdir()
    Path("bad", PIPELINE_FILE).write_text("{")
    Path("bytes.csv").write_bytes(b"\xff\xfe0F0")
    for name, text in (
        ("empty", ""),
        ("word", "0F0,word\n"),
        ("good", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"),
        ("lost", "0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n"),
        ("twice", "0F0,0F1,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"),
        ("circle", "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n"),
    ):
        Path(f"{name}.csv").write_text(text)
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_of_unequal_ranks_says_how_many_chunks_they_have() -> None:
    Path("uneven.csv").write_text("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    with pytest.raises(UserError, match=r"--chunks 2 contradicts uneven\.csv, which has 1 to 2"):
        answer(Asked("uneven.csv", "1,1,1,0", chunks=2))
    assert answer(Asked("uneven.csv", "1,1,1,0")).times.forward == (0.5, 1.0, 0.5)


def test_the_command_loads_neither_torch_nor_numpy_nor_pydantic() -> None:
    code = (
        "import sys; from fivefold.cli import commands\n"
        "commands.main(['schedule', 'zb-v', '--pp', '8', '--microbatches', '32', '--html', 'a.html'],"
        " standalone_mode=False)\n"
        "print({'torch', 'numpy', 'pydantic', 'ruamel'} & set(sys.modules), file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "set()"


def test_a_pipe_is_written_into_and_not_replaced() -> None:
    words = ["schedule", "gpipe", "--pp", "1", "--microbatches", "1", "--csv", "/dev/stderr"]
    ran = subprocess.run([sys.executable, "-m", "fivefold", *words], capture_output=True, text=True, check=True)
    assert ran.stderr == "0F0,0B0\n"
