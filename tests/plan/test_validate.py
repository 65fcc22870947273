"""The planner against the published runs that ship with it: bounds, so that it cannot rot."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fivefold.cli import commands
from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.plan.published import accuracy
from fivefold.plan.published.fields import FIELDS
from fivefold.plan.published.rows import SHIPPED, read_rows
from fivefold.plan.published.validate import MOE, OTHER, STEP_TIME, Errors, Prediction, Validation, validate
from fivefold.plan.time.step import StepTime, step_time


@pytest.fixture(scope="module")
def found() -> Validation:
    return validate()


def at_most(error: float | None, bound: float) -> bool:
    return error is not None and error <= bound


def test_step_times_of_dense_rows_that_say_everything_are_within_7_percent(found: Validation) -> None:
    errors = found.step_time(STEP_TIME)
    assert errors.rows == 242
    assert at_most(errors.mean_abs_error, 0.055)
    assert at_most(errors.p90_abs_error, 0.125)


@pytest.mark.parametrize("bar", [accuracy.STEP_TIME, accuracy.STEP_TIME_MOE, accuracy.MEMORY], ids=lambda bar: bar.of)
def test_the_error_bars_of_a_plan_are_those_of_the_validation(found: Validation, bar: accuracy.Bar) -> None:
    kinds = {accuracy.STEP_TIME: STEP_TIME, accuracy.STEP_TIME_MOE: MOE}
    errors = found.step_time(kinds[bar]) if bar in kinds else found.memory()
    assert bar.rows == errors.rows
    assert (bar.mean, bar.p90) == pytest.approx((errors.mean_abs_error, errors.p90_abs_error), abs=0.0015)


def test_no_source_of_dense_rows_is_far_off(found: Validation) -> None:
    means = {name: each.mean_abs_error for name, each in found.step_time(STEP_TIME).by_source.items()}
    assert max(mean for mean in means.values() if mean is not None) <= 0.13


def test_rows_with_experts_are_within_25_percent(found: Validation) -> None:
    errors = found.step_time(MOE)
    assert errors.rows == 29
    assert at_most(errors.mean_abs_error, 0.22)


def test_rows_that_leave_something_unsaid_are_near_with_the_defaults(found: Validation) -> None:
    errors = found.step_time(OTHER)
    assert errors.rows == 71
    assert at_most(errors.mean_abs_error, 0.08)


def test_peak_memory_is_within_6_percent(found: Validation) -> None:
    errors = found.memory()
    assert errors.rows >= 80
    assert at_most(errors.mean_abs_error, 0.05)
    assert at_most(errors.p90_abs_error, 0.10)


def test_runs_that_ran_out_of_memory_are_recognized_and_those_that_fitted_accepted(found: Validation) -> None:
    oom = found.oom()
    assert oom["recognized"] == oom["of"] == 2
    assert oom["wrongly_refused"] <= 0.02 * oom["fitting"]
    assert oom["fitting"] >= 250


def test_inside_a_sweep_the_faster_run_is_found(found: Validation) -> None:
    order = found.ordering()
    assert order["of"] > 600
    assert order["right"] >= 0.92 * order["of"]


def test_the_report_has_the_documented_keys_and_lists_every_row(found: Validation) -> None:
    report = json.loads(json.dumps(found.json()))
    for key in ("step_time", "step_time_moe", "step_time_other", "memory"):
        assert {"mean_abs_error", "p90_abs_error", "rows", "by_source"} <= set(report[key])
    assert set(report["oom"]) == {"recognized", "of", "wrongly_refused", "fitting"}
    assert set(report["ordering"]) == {"right", "of"}
    assert len(report["predictions"]) == len(read_rows())
    assert all({"id", "source", "predicted", "measured", "doubtful"} <= set(each) for each in report["predictions"])
    text = "\n".join(found.lines())
    assert "in total" in text
    assert "doubtful, not counted" in text
    table = text.partition("\n\n")[0].split("\n")[1:]
    assert len({line.split("  ")[0] for line in table}) == len(table) > 15


def test_doubtful_rows_count_nowhere(found: Validation) -> None:
    sure = Validation(tuple(each for each in found.predictions if not each.row.doubtful))
    assert sure.json() | {"predictions": []} == found.json() | {"predictions": []}


def test_the_90th_percentile_is_an_error_that_nine_in_ten_do_not_exceed() -> None:
    errors = Errors.of([("a", error / 100) for error in (-10, 9, -8, 7, 6, 5, 4, 3, 2, 1)])
    assert errors.p90_abs_error == 0.09
    assert errors.mean_abs_error == pytest.approx(0.055)


def test_a_pair_counts_as_ordered_only_if_its_speeds_differ_enough(found: Validation) -> None:
    one = next(each for each in found.predictions if each.row.id.startswith("internevo-7b-tp1-z8-8"))

    def predicted(measured: float, seconds: float) -> Prediction:
        return replace(one, row=replace(one.row, seconds=measured), seconds=seconds)

    near, right, wrong = predicted(1.05, 2.0), predicted(1.2, 1.1), predicted(1.2, 0.9)
    base = predicted(1.0, 1.0)
    assert Validation((base, near)).ordering() == {"right": 0, "of": 0}
    assert Validation((base, right)).ordering() == {"right": 1, "of": 1}
    assert Validation((base, wrong)).ordering() == {"right": 0, "of": 1}


def test_a_source_is_predicted_by_a_fit_that_has_not_seen_it_and_worse_than_by_the_shipped_one(tmp_path: Path) -> None:
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
    rows = [row for row in shipped if "a100_80gb" in row["id"] or "internevo-7b-flops" in row["id"]][::3]
    file = tmp_path / "runs.json"
    file.write_text(json.dumps(rows))
    left_out = validate(file, leave_one_out=True).left_out
    assert left_out is not None
    assert left_out.rows == len(rows)
    assert len(left_out.by_source) == 2
    assert at_most(left_out.mean_abs_error, 0.2)
    assert not at_most(left_out.mean_abs_error, 0.055)


def test_a_row_of_which_nothing_can_be_said_is_listed_and_the_others_are_predicted(tmp_path: Path) -> None:
    shipped = json.loads(SHIPPED.read_text(encoding="utf-8"))
    good, unknown, narrow, short = (json.loads(json.dumps(shipped[0])) for _ in range(4))
    unknown["hardware"]["gpu"] = "H10O-SXM"
    narrow["layout"]["precision"] = "fp8"
    del short["model"]["hidden"]
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([good, unknown, narrow, short]))
    found = validate(file)
    assert len(found.predictions) == 1
    whys = [each["why"] for each in found.json()["unread"]]
    assert ["H100" in whys[0], "hidden" in whys[1], "no products in fp8" in whys[2]] == [True] * 3
    assert "no products in fp8" in found.lines()[-1]
    file.write_text(json.dumps([unknown]))
    with pytest.raises(UserError, match="H100"):
        validate(file)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    file.write_text("[]")
    with pytest.raises(UserError, match="no rows"):
        validate(file)


ODD = (None, "", "x", [], {}, True, 0, -1, 2.5, 1e30, float("nan"))
"""What may stand in a field by a slip."""
ODDER = ("9" * 400 + " Gb/s", "0 Gb/s", "\ud800", "two\nlines", -(10**30), float("inf"), [[[[]]]], 10**6)


def shipped(*ids: str) -> list[dict[str, Any]]:
    rows = {row["id"]: row for row in json.loads(SHIPPED.read_text(encoding="utf-8"))}
    return [rows[id] for id in ids]


def mangled(row: dict[str, Any], values: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """The row with each field in turn, of those it has and those it might have, as each of `values`; or without it."""
    own = [key for key in row if key not in FIELDS]
    own += [f"{section}.{key}" for section in ("model", "hardware", "layout", "measured") for key in row[section]]
    for path in dict.fromkeys([*FIELDS, *own]):
        *sections, name = path.split(".")
        for value in values:
            changed = deepcopy(row)
            place = changed
            for section in sections:
                if place.get(section) is None:
                    place[section] = {}
                place = place[section]
            place[name] = deepcopy(value)
            yield changed
        yield {key: value for key, value in row.items() if key != path}


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ("zb-t6-6.2B-ZB-V-p16-m128-b6", ODD),
        ("mbridge-DeepSeekV3-DGX-GB300-MXFP8-256-tp1pp2cp1vp8ep32-mb1-gb15360-26.06", ODD),
        ("internevo-7b-tp2-z4-64", ODD + ODDER),
    ],
)
def test_no_odd_value_of_any_field_ends_or_holds_up_a_validation(tmp_path: Path, row: str, values: tuple) -> None:
    rows = [each for kept in shipped(row) for each in mangled(kept, values)]
    file = tmp_path / "runs.json"
    file.write_text(json.dumps(rows))
    began = time.monotonic()
    found = validate(file)
    assert time.monotonic() - began < 60
    assert len(found.predictions) + len(found.unread) == len(rows) > 700
    assert len(found.unread) > 300
    "\n".join(found.lines()).encode()
    json.dumps(found.json(), allow_nan=False)
    unforeseen = {each.why for each in found.unread if "nothing can be made of it" in each.why}
    assert unforeseen <= set(), "each of these has words of its own"


def changed(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A row with other values, by section and field joined with two underscores."""
    made = deepcopy(row)
    for name, value in changes.items():
        section, _, field = name.partition("__")
        made[section][field] = value
    return made


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hardware__count": 64}, "tp x pp x cp x dp = 256, and count = 64"),
        ({"hardware__count": -1}, "hardware.count is -1, and should be a whole number from 1 to 1,000,000"),
        ({"hardware__count": True}, "hardware.count is True, and should be a whole number"),
        ({"hardware__count": 1e30}, "hardware.count is 1e+30, and should be a whole number"),
        ({"layout__tp": 1e30}, "layout.tp is 1e+30"),
        ({"model__layers": 1e30}, "model.layers is 1e+30"),
        ({"model__hidden": 2.5}, "model.hidden is 2.5, and should be a whole number"),
        ({"measured__iter_s": 0}, "measured.iter_s is 0, and should be a number from 1e-06 to 1e+09"),
        ({"layout__dp": None, "hardware__count": 7}, "tp x pp x cp = 8, and count = 7 is no multiple"),
        ({"layout__ep": 4}, "ep = 4, and the model has no experts"),
        ({"layout__zero_group": 5}, "groups of 5 share the optimizer state (zero_group), and dp = 32 is no multiple"),
        ({"layout__global_batch": 8}, "micro_batch x dp = 1 x 32 = 32, and global_batch = 8"),
        ({"model__layers": 5}, "pp = 8 makes 8 stages, and layers = 5"),
        ({"model__kv_heads": 5}, "heads = 32 are no multiple of kv_heads = 5"),
        ({"hardware__inter": "0 Gb/s"}, "hardware.inter is '0 Gb/s', 0 bytes/s a GPU"),
    ],
)
def test_a_row_that_cannot_be_is_told_with_its_numbers(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    """pp 8 x dp 32 on 64 GPUs, or -1 GPUs, was predicted without a word."""
    (base,) = shipped("internevo-7b-tp1-z8-8")
    good = changed(base, layout__pp=8, layout__dp=32, hardware__count=256, layout__global_batch=256)
    good = changed(good, layout__micro_batch=1)
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([good, changed(good, **change)]))
    found = validate(file)
    assert len(found.predictions) == 1
    assert says in found.unread[0].why


@pytest.mark.parametrize(
    ("error", "says"),
    [(ZeroDivisionError("float division by zero"), "float division by zero"), (KeyError(), "KeyError()")],
)
def test_what_nobody_foresaw_of_a_row_hinders_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    good, bad = shipped("internevo-7b-tp1-z8-8", "korth22-22B-full")

    def seconds(run: Run, *others: Any) -> StepTime:
        if run.model.hidden == bad["model"]["hidden"]:
            raise error
        return step_time(run, *others)

    monkeypatch.setattr("fivefold.plan.published.validate.step_time", seconds)
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([bad, good]))
    found = validate(file)
    assert [each.row.id for each in found.predictions] == [good["id"]]
    assert [(each.id, each.why) for each in found.unread] == [(bad["id"], f"nothing can be made of it: {says}")]


def test_a_file_with_a_mark_of_its_byte_order_is_read_and_one_nested_deep_is_one_message(tmp_path: Path) -> None:
    file = tmp_path / "runs.json"
    file.write_text(json.dumps(shipped("internevo-7b-tp1-z8-8")), encoding="utf-8-sig")
    assert len(validate(file).predictions) == 1
    file.write_text("[" * 100_000 + "]" * 100_000)
    result = CliRunner().invoke(commands, ["validate-plan", str(file)])
    assert result.exit_code == 2
    assert "nested too deep" in result.output
    assert "Traceback" not in result.output
