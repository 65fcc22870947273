"""`fivefold report`: what the page shows is what the files say, and what is not there is said in one message."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner

from fivefold.cli import commands
from fivefold.config.files import dump_run
from fivefold.config.run import Data, Experts, Loss, Model, Parallel, Routing, Run, Section, Source
from fivefold.errors import UserError
from fivefold.observe.curves import STRIPS, WIDTH, Curve, picture
from fivefold.observe.heat import EDGES, shade
from fivefold.observe.history import read_history
from fivefold.observe.report import CELLS_AT_MOST, report, write_report

COUNTS = {1: {"1": [9, 3, 0], "2": [4, 4, 4]}, 10: {"1": [6, 4, 2], "2": [1, 1, 10]}}
"""By step, layer and expert. Layer 2 is the block that predicts one token more."""


def line(step: int, **more: object) -> dict[str, object]:
    """A line of metrics."""
    rates = {"tokens": 64 * step, "lr": 1e-3, "step_s": 0.5, "tok_per_s": 128.0, "tok_per_s_gpu": 128.0}
    return {"step": step, "loss": 4.0 / step, "grad_norm": 1.0, "mfu": None, "mem_peak_gib": 0.5} | rates | more


def a_run(
    folder: Path, moe: Experts | None, lines: list[dict], counts: dict[int, dict] | None = None, **sections: Section
) -> Path:
    """The folder of a run."""
    model = Model(layers=2, hidden=8, heads=1, ffn=8, vocab=16, moe=moe, mtp=1 if moe else 0)
    data = Data(train=[Source(path=Path("data/x"))], seq_len=8)
    folder.mkdir(exist_ok=True)
    (folder / "run.yaml").write_text(dump_run(Run(name="tiny", steps=20, model=model, data=data, **sections)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    event = {"time": "2026-01-02T03:04:05.678+00:00", "kind": "started", "message": "started <runs/tiny> & more"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    if counts is not None:
        text = "".join(json.dumps({"step": step, "counts": by_layer}) + "\n" for step, by_layer in counts.items())
        (folder / "experts.jsonl").write_text(text)
    return folder


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    """A run with experts in its second layer and its further block."""
    lines = [
        {"step": 0, "val_loss/held": 5.0},
        line(1, moe_load_max=2.25, moe_load_mean=1.5, moe_entropy=0.9, moe_dropped=0.0, **{"mtp_loss/1": 4.5}),
        line(10, moe_load_max=2.5, moe_load_mean=2.0, moe_entropy=0.8, moe_dropped=0.0, **{"val_loss/held": 3.0}),
    ]
    return a_run(tmp_path / "tiny", Experts(experts=3, top_k=1, ffn=8, dense_layers=1), lines, COUNTS)


def pictures(page: str) -> dict[str, ET.Element]:
    """Each picture of a page by its title; each is well-formed."""
    roots = [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    return {root.attrib["aria-label"]: root for root in roots}


def titles(root: ET.Element, style: str) -> dict[str, str]:
    """What shows at each rectangle whose class begins with `style`, and that class."""
    rectangles = [each for each in root.iter("rect") if each.attrib["class"].startswith(style)]
    return {each.findtext("title", ""): each.attrib["class"] for each in rectangles if each.find("title") is not None}


def test_the_heat_map_has_a_cell_a_layer_and_expert_with_its_numbers(sparse: Path) -> None:
    drawn = pictures(report(read_history(sparse)))
    assert titles(drawn["loads in step 10"], "h") == {
        "layer 1, expert 0: 1.5 x even, 6 choices": f"h{shade(1.5)}",
        "layer 1, expert 1: 1 x even, 4 choices": f"h{shade(1)}",
        "layer 1, expert 2: 0.5 x even, 2 choices": f"h{shade(0.5)}",
        "mtp 1, expert 0: 0.25 x even, 1 choices": f"h{shade(0.25)}",
        "mtp 1, expert 1: 0.25 x even, 1 choices": f"h{shade(0.25)}",
        "mtp 1, expert 2: 2.5 x even, 10 choices": f"h{shade(2.5)}",
    }


def test_over_time_the_layer_stands_that_is_least_even_now(sparse: Path) -> None:
    drawn = pictures(report(read_history(sparse)))
    shown = titles(drawn["loads in mtp 1, the least even of step 10, over the steps"], "h")
    assert [name.split(":")[0] for name in shown] == [
        f"step {step}, mtp 1, expert {expert}" for step in (1, 10) for expert in range(3)
    ]
    by_layer = titles(drawn["largest load of each layer, x even"], "strip")
    assert list(by_layer) == ["step 1\nlayer 1 2.25\nmtp 1 1", "step 10\nmtp 1 2.5\nlayer 1 1.5"]


def test_colours_change_at_the_loads_of_the_legend() -> None:
    assert [shade(load) for load in (0, *EDGES)] == list(range(len(EDGES) + 1))
    assert shade(1.0) == len(EDGES) // 2


def test_curves_and_facts_are_those_of_the_lines(sparse: Path) -> None:
    page = report(read_history(sparse))
    drawn = pictures(page)
    assert list(titles(drawn["loss (nats a token)"], "strip")) == [
        "step 0\nvalidation held 5",
        "step 1\nmtp 1 4.5\nloss 4",
        "step 10\nvalidation held 3\nloss 0.4",
    ]
    assert "<td>step 10 of 20, 640 tokens</td>" in page
    assert "<td>3 at step 10; best 3 at 10</td>" in page
    assert "<td>3 a layer, 1 a token, of width 8; softmax scores; from layer 1 on</td>" in page
    assert "share of choices dropped" not in drawn, "none was"


@pytest.mark.parametrize(
    ("bias", "sections", "says"),
    [
        (False, {}, "nothing"),
        (True, {}, "biases, rate 0.001"),
        (True, {"routing": Routing(bias_rate=0)}, "nothing"),
        (True, {"routing": Routing(bias_rate=0), "loss": Loss(balance_sequence=0.01)}, "balance_sequence 0.01"),
        (
            True,
            {
                "routing": Routing(bias_rate=0.02, capacity_factor=1.25, placement="load"),
                "loss": Loss(balance_sequence=0.01, balance_global=0.5, router_z=0.1),
                "parallel": Parallel(ep=2),
            },
            "biases, rate 0.02, balance_sequence 0.01, balance_global 0.5, capacity_factor 1.25, placement by load",
        ),
        (False, {"routing": Routing(placement="load")}, "nothing"),
    ],
)
def test_all_that_balances_the_experts_is_named(tmp_path: Path, bias: bool, sections: dict, says: str) -> None:
    """Biases that no rate moves were said to, and losses were not."""
    moe = Experts(experts=4, top_k=1, ffn=8, bias=bias)
    page = report(read_history(a_run(tmp_path / "tiny", moe, [line(1)], **sections)))
    assert f"<tr><th>balanced by</th><td>{says}</td></tr>" in page


def test_a_page_needs_nothing_from_elsewhere_and_escapes_what_it_shows(sparse: Path) -> None:
    page = report(read_history(sparse))
    assert not re.search(r"<script|<link|<img|https?://|@import|url\(", page)
    assert "started &lt;runs/tiny&gt; &amp; more" in page
    assert "prefers-color-scheme:dark" in page
    used = set(re.findall(r"var\((--\w+)\)", page))
    light, dark = (set(re.findall(r"(--\w+):#", part)) for part in (page.replace("@media", "\n"), _dark(page)))
    assert used <= dark
    assert dark <= light


def _dark(page: str) -> str:
    return "".join(re.findall(r"@media\(prefers-color-scheme:dark\)\{:root\{(.*?)\}", page))


def test_a_dense_run_has_no_word_of_experts(tmp_path: Path) -> None:
    page = report(read_history(a_run(tmp_path / "tiny", None, [line(1), line(2)])))
    assert "xpert" not in page
    assert "loss (nats a token)" in pictures(page)


def test_torn_and_strange_lines_are_left_out(sparse: Path) -> None:
    strange = [{"1": [1, 2]}, {"1": [1, 2, 3]}, {"1": [1, 2, 3], "2": [1, "x", 3]}, {"x": [1, 2, 3], "2": [1, 2, 3]}, 5]
    with (sparse / "experts.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": 11, "counts": each}) + "\n" for each in strange)
        file.write('{"step": 12, "cou')
    with (sparse / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line(11, loss="NaN", grad_norm="Infinity")) + '\n{"step": "x"}\n{"st')
    history = read_history(sparse)
    assert [each.step for each in history.choices] == [1, 10]
    assert history.last["step"] == 11
    assert "step 11\nloss nan" in titles(pictures(report(history))["loss (nats a token)"], "strip")


def test_a_long_run_is_drawn_to_the_pixel_with_its_spikes() -> None:
    points = [(step, 100.0 if step == 54_321 else 1.0 + step % 2) for step in range(100_000)]
    root = ET.fromstring(picture("long", [Curve("loss", points)]))
    (curve,) = [each for each in root.iter("path") if "curve" in each.attrib["class"]]
    heights = [float(place.split()[1]) for place in curve.attrib["d"][1:].split("L")]
    assert len(heights) <= 2 * WIDTH
    spike, next_highest = sorted(heights)[:2]
    assert spike < next_highest - 100
    assert len(titles(root, "strip")) <= STRIPS + 1


def test_many_experts_over_many_steps_stay_below_what_a_browser_moves_through(tmp_path: Path) -> None:
    rows = {str(layer): [1] * 128 for layer in (1, 2)}
    counts = dict.fromkeys(range(1, 301), rows)
    folder = a_run(tmp_path / "tiny", Experts(experts=128, top_k=1, ffn=8, dense_layers=1), [line(300)], counts)
    drawn = pictures(report(read_history(folder)))
    (name,) = [name for name in drawn if "over the steps" in name]
    cells = list(titles(drawn[name], "h"))
    assert len(cells) == CELLS_AT_MOST // 128 * 128
    assert cells[0].startswith("step 1,")
    assert cells[-1].startswith("step 300,")


def test_the_command_writes_where_it_says(sparse: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "page.html"
    for words, target in (((), sparse / "report.html"), (("--html", str(elsewhere)), elsewhere)):
        result = CliRunner().invoke(commands, ["report", str(sparse), *words])
        assert (result.exit_code, result.stdout) == (0, f"{target} is the report of {sparse}\n")
        assert target.read_text() == report(read_history(sparse))


def test_what_is_wrong_is_said_and_an_earlier_report_stays(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no-such holds no run.yaml: name the folder of a run"):
        write_report(tmp_path / "no-such")
    folder = a_run(tmp_path / "tiny", None, [{"step": 0, "val_loss/held": 5.0}])
    (folder / "report.html").write_text("earlier")
    with pytest.raises(UserError, match=r"metrics.jsonl has no step yet"):
        write_report(folder)
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics.jsonl has no step yet"):
        write_report(folder)
    assert (folder / "report.html").read_text() == "earlier"
    a_run(folder, None, [line(1)])
    with pytest.raises(UserError, match=r"cannot write .*nowhere/page.html: there is no folder"):
        write_report(folder, tmp_path / "nowhere" / "page.html")
    result = CliRunner().invoke(commands, ["report", str(tmp_path / "no-such")])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
