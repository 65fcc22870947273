"""The page of a plan in a browser without a network: what it shows is what the JSON says, in light and in dark."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.run import Recompute
from fivefold.errors import UserError
from fivefold.plan.forecast import Forecast
from fivefold.plan.page.document import page, write_page
from fivefold.plan.planned import plan
from fivefold.plan.quantities import count
from tests.plan.test_forecast import large, small

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
GIB = 2**30
LOOK = """<script>
const box = e => { const b = e.getBoundingClientRect(); return [b.x, b.width, b.height]; };
const all = (what, how) => [...document.querySelectorAll(what)].map(how);
const seen = {
  figures: Object.fromEntries(all("tr[data-figure]", e => [e.dataset.figure, [...e.cells].map(c => c.innerText)])),
  times: Object.fromEntries(all("tr[data-time]", e => [e.dataset.time, [...e.cells].map(c => c.innerText)])),
  scaling: all("tr[data-gpus]", e => [...e.cells].map(c => c.innerText)),
  points: all("circle[data-gpus]", e => [+e.dataset.gpus, box(e)[0]]),
  memory: all("rect[data-rank]", e => [+e.dataset.rank, e.dataset.part, ...box(e)]),
  parts: all("rect[data-part]:not([data-rank])", e => [e.dataset.part, box(e)[1]]),
  capacity: all("path.limit", e => [+e.dataset.capacity, box(e)[0]]),
  actions: all(".pipeline rect title", e => 1).length,
  verdict: document.getElementById("verdict").innerText,
  loaded: performance.getEntriesByType("resource").length,
  wide: document.documentElement.scrollWidth > innerWidth,
  paper: getComputedStyle(document.body).backgroundColor,
  ink: getComputedStyle(document.body).color,
  chart: getComputedStyle(document.querySelector("svg.chart text")).fill,
  pipeline: getComputedStyle(document.querySelector(".pipeline .paper") || document.body).fill,
};
const told = document.createElement("pre");
told.id = "seen";
told.textContent = JSON.stringify(seen);
document.body.append(told);
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None and not os.environ.get("CI"):
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    assert found is not None, "the whole check installs a browser"
    return found


@pytest.fixture(scope="module")
def forecast() -> Forecast:
    return plan(large(recompute=Recompute(mode="selective"))).forecast()


def look(browser: str, file: Path, dark: bool) -> dict[str, Any]:
    """What a reader sees of the page: texts and boxes, found by a script that is added to it."""
    file.with_suffix(".look.html").write_text(file.read_text().replace("</body>", f"{LOOK}</body>"))
    words = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--host-resolver-rules=MAP * ~NOTFOUND", f"--blink-settings=preferredColorScheme={0 if dark else 1}"),
        *(f"--user-data-dir={file.parent / 'browser'}", "--window-size=1300,1000", "--virtual-time-budget=5000"),
        *("--dump-dom", file.with_suffix(".look.html").as_uri()),
    ]
    shown = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120).stdout
    (text,) = re.findall(r'<pre id="seen">(.*?)</pre>', shown, flags=re.DOTALL)
    return json.loads(unescape(text))


@pytest.fixture(scope="module")
def seen(browser: str, forecast: Forecast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = write_page(forecast, tmp_path_factory.mktemp("page") / "plan.html")
    return look(browser, file, dark=False)


@pytest.fixture(scope="module")
def told(forecast: Forecast) -> dict[str, Any]:
    return json.loads(json.dumps(forecast.json()))


def number(text: str) -> float:
    """What people write, as a number in SI: 9.81 s, 26.6%, 15.6T, 4.87 TB, 59.73 GiB, 38,827 MWh."""
    found = re.match(r"([\d.,e+-]+)\s*(\S*)", text)
    assert found, text
    value, unit = float(found[1].replace(",", "")), found[2]
    scale = {"": 1, "s": 1, "min": 60, "h": 3600, "days": 1, "%": 0.01, "GiB": GIB, "MWh": 1e3}
    letters = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12, "P": 1e15}
    return value * (scale[unit] if unit in scale else letters[unit[0]])


def test_every_figure_is_shown_as_the_json_has_it(seen: dict[str, Any], told: dict[str, Any]) -> None:
    assert list(seen["figures"]) == list(told["figures"])
    for name, (_, value, error, basis, formula) in seen["figures"].items():
        figure = told["figures"][name]
        assert number(value) == pytest.approx(figure["value"], rel=6e-3), name
        assert basis == figure["basis"]
        assert value in formula
        assert (error == "") == (figure["error"] is None)
        if error:
            assert int(error.strip("+- %")) == round(100 * figure["error"]["p90"])


def test_the_bars_of_memory_are_as_long_as_the_bytes_and_the_capacity_is_where_it_belongs(
    seen: dict[str, Any], told: dict[str, Any]
) -> None:
    memory = told["memory"]
    ((capacity, limit),) = seen["capacity"]
    start = min(x for _, _, x, _, _ in seen["memory"])
    scale = (limit - start) / memory["capacity"]
    assert capacity == pytest.approx(memory["capacity"] / GIB, abs=0.01)
    shown = {(rank, part): width for rank, part, _, width, _ in seen["memory"]}
    for rank in memory["ranks"]:
        for part, size in rank["bytes"].items():
            assert shown.get((rank["pp"], part), 0.0) == pytest.approx(size * scale, abs=1.5), (rank["pp"], part)
    ends = {rank: x + width for rank, _, x, width, _ in seen["memory"]}
    assert max(ends, key=lambda rank: ends[rank]) == memory["worst"]
    assert all(end < limit for end in ends.values()), "it fits"


def test_the_time_of_a_step_is_shown_by_its_parts(seen: dict[str, Any], told: dict[str, Any]) -> None:
    parts, total = told["time"]["parts"], told["figures"]["step_seconds"]["value"]
    whole = sum(width for _, width in seen["parts"])
    assert {name for name, _ in seen["parts"]} == set(seen["times"]) == {name for name in parts if parts[name]}
    for name, width in seen["parts"]:
        assert width / whole == pytest.approx(parts[name] / total, abs=2e-3)
        assert number(seen["times"][name][1]) == pytest.approx(parts[name], rel=6e-3)
        assert number(seen["times"][name][2]) == pytest.approx(parts[name] / total, abs=6e-4)


def test_the_scaling_is_shown_as_the_json_has_it(seen: dict[str, Any], told: dict[str, Any]) -> None:
    assert len(seen["scaling"]) == len(told["scaling"]) == 5
    for (gpus, dp, seconds, days, hours, efficiency, _), point in zip(seen["scaling"], told["scaling"], strict=True):
        assert (number(gpus), number(dp)) == (point["gpus"], point["dp"])
        assert number(seconds) == pytest.approx(point["step_seconds"], rel=6e-3)
        assert number(days) == pytest.approx(point["calendar_days"], rel=1e-3)
        assert hours == count(point["paid_gpu_hours"])
        assert number(efficiency) == pytest.approx(point["efficiency"], abs=6e-4)
    places = [x for _, x in seen["points"]]
    assert [gpus for gpus, _ in seen["points"]] == 2 * [point["gpus"] for point in told["scaling"]]
    assert places == sorted(places), "two pictures beside each other"


def test_the_pipeline_is_drawn_and_nothing_is_loaded_and_nothing_too_wide(
    seen: dict[str, Any], forecast: Forecast
) -> None:
    assert forecast.schedule is not None
    assert seen["actions"] >= sum(map(len, forecast.schedule.actions))
    assert seen["loaded"] == 0
    assert not seen["wide"]
    assert seen["verdict"] == forecast.verdict()


def test_the_page_follows_the_readers_choice_of_dark(browser: str, tmp_path: Path) -> None:
    file = write_page(small(), tmp_path / "plan.html")
    for dark in (False, True):
        seen = look(browser, file, dark)
        bright = {key: sum(map(int, re.findall(r"\d+", seen[key])[:3])) > 384 for key in ("paper", "ink", "chart")}
        assert bright == {"paper": not dark, "ink": dark, "chart": dark}
        assert seen["pipeline"] == seen["paper"]


def test_the_page_names_nothing_from_elsewhere_and_has_no_script(forecast: Forecast) -> None:
    text = page(forecast)
    assert set(re.findall(r"https?://[^\"\s<]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_a_page_of_a_run_that_does_not_fit_says_what_would_and_one_of_a_single_stage_has_no_pipeline() -> None:
    tight = page(plan(large()).forecast())
    assert '<p class="bad" id="verdict">does not fit: pipeline rank 1' in tight
    assert "it would fit with one of: " in tight
    assert "There is a single stage, and no pipeline." in page(small(pp=1))


def test_of_very_many_microbatches_the_first_are_drawn() -> None:
    run = large()
    many = run.model_copy(update={"batch": run.batch.model_copy(update={"global_size": 128 * 1000})})
    text = page(plan(many).forecast())
    assert re.search(r"Drawn are 1\d\d of a step.s 1,000 microbatches", text)


def test_a_page_that_cannot_be_written_says_so(forecast: Forecast, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*gone/plan\.html"):
        write_page(forecast, tmp_path / "gone" / "plan.html")
