"""An accelerator that a user describes: what a file must say, and what is said of one that cannot be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.config.yaml12 import write_text
from fivefold.errors import UserError
from fivefold.hardware.accelerator import Accelerator
from fivefold.hardware.catalogue import accelerators, by_name
from fivefold.hardware.entry import FAMILIES, QUANTITIES, accelerator_of, entry_of, faults, read_entry, write_entry
from fivefold.plan.constants import FITTED_FAMILIES, constants
from fivefold.plan.time.rates import MULTIPROCESSORS, WATTS, WITHOUT_TILES

GOOD: dict[str, Any] = {
    "name": "own",
    "peak_tflops": {"bf16": 989, "fp8": 1979},
    "matmul_tflops": {"bf16": 790},
    "memory_gb": 141,
    "memory_mib": 143771,
    "bandwidth_tb_s": 4.8,
    "link_gb_s": 450,
    "domain": 8,
    "per_node": 8,
    "nic_gbit_s": 400,
    "watts": 700,
}


def written(folder: Path, changes: dict[str, Any]) -> Path:
    """The good file with changes; None takes a key out."""
    file = folder / "own.yaml"
    entry = {key: value for key, value in (GOOD | changes).items() if value is not None}
    file.write_text(write_text(entry))
    return file


def complaint(folder: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as error:
        read_entry(written(folder, changes))
    return str(error.value)


def test_a_whole_file_is_read_in_plain_units(tmp_path: Path) -> None:
    found = by_name(str(written(tmp_path, {})))
    assert (found.name, found.family, found.peak["fp8"], found.matmul) == ("own", "other", 1979e12, {"bf16": 790e12})
    assert (found.memory, found.nominal_memory, found.bandwidth) == (143771 * 2**20, 141e9, 4.8e12)
    assert (found.link, found.pair, found.domain, found.nic, found.watts) == (450e9, 450e9, 8, 50e9, 700)
    assert found.confidence["bandwidth_tb_s"] == "given"


def test_the_least_that_a_file_must_say(tmp_path: Path) -> None:
    file = tmp_path / "small-card.yml"
    file.write_text("matmul_tflops: {bf16: 60}\nmemory_mib: 24000\nbandwidth_tb_s: 0.6\n")
    found = read_entry(file)
    assert (found.name, found.peak, found.link, found.domain) == ("small-card", {"bf16": 60e12}, 0, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bandwidth_tb_s": 3350}, "bandwidth_tb_s = 3350: nothing has 3,350 TB/s"),
        ({"bandwidth_tb_s": 3350}, "the most would be 60; if that is GB/s, write 3.35 ("),
        ({"bandwidth_tb_s": 0}, "bandwidth_tb_s = 0: it must be above 0"),
        ({"bandwidth_tb_s": None}, "bandwidth_tb_s is missing"),
        ({"bandwidth_tb_s": "fast"}, "bandwidth_tb_s = 'fast': it must be a number of TB/s"),
        ({"bandwidth_tb_s": True}, "bandwidth_tb_s = True: it must be a number"),
        ({"peak_tflops": {"bf16": 989e12}}, "if that is FLOP/s, write 989"),
        ({"peak_tflops": {"bf16": 989000}, "matmul_tflops": None}, "if that is GFLOP/s, write 989"),
        ({"peak_tflops": {"bf17": 989}}, "peak_tflops.bf17: there is no such format"),
        ({"peak_tflops": 989}, "peak_tflops = 989: it must give TFLOP/s by format"),
        ({"peak_tflops": {"bf16": 700}}, "matmul_tflops.bf16 = 790 is measured and lies above peak_tflops.bf16 = 700"),
        ({"peak_tflops": {"bf16": 1979, "fp8": 989}}, "peak_tflops.fp8 = 989 lies below peak_tflops.bf16 = 1979"),
        ({"peak_tflops": None, "matmul_tflops": None}, "peak_tflops is missing"),
        ({"memory_gb": None, "memory_mib": None}, "memory_mib is missing"),
        ({"memory_mib": 80000}, "memory_mib = 80,000 and memory_gb = 141 differ"),
        ({"memory_gb": 141e9}, "if that is bytes, write 141"),
        ({"link_gb_s": 0}, "link_gb_s = 0, and yet the links join domain = 8"),
        ({"link_gb_s": None}, "link_gb_s is missing"),
        ({"domain": 1}, "link_gb_s = 450 joins domain = 1"),
        ({"domain": 8.5}, "domain = 8.5: it must be a whole number"),
        ({"pair_gb_s": 500}, "pair_gb_s = 500 is a part of link_gb_s = 450"),
        ({"nic_gbit_s": 400e9}, "if that is bit/s, write 400"),
        ({"nic_gbit_s": 40000}, "if that is Mbit/s, write 40"),
        ({"watts": -1}, "watts = -1: it must be above 0"),
        ({"bandwith": 3.35}, "bandwith: there is no such key; did you mean bandwidth_tb_s?"),
        ({"name": 7}, "name = 7: it must be a text"),
        (
            {"family": "Blackwel"},
            "family = Blackwel: there is no such family; did you mean Blackwell? known are V100, A10",
        ),
        ({"family": "h100"}, "family = h100: there is no such family; did you mean H100?"),
        ({"measured": {"copy_tb_s": 5.0}}, "measured.copy_tb_s = 5 lies above bandwidth_tb_s = 4.8"),
        ({"measured": {"copy": 5.0}}, "measured.copy: there is no such key"),
        ({"measured": {"products": [{"m": 1}]}}, "measured.products: each row must have format, m, n, k, tflops"),
        ({"measured": {"collectives": [{"kind": "send", "ranks": 2, "mib": 1, "ms": 0}]}}, "ms = 0: it must be"),
        ({"measured": {"attention_tflops": {"sideways": 1}}}, "it must give forward and backward"),
    ],
)
def test_what_cannot_be_right_is_said_in_one_message(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    text = complaint(tmp_path, **changes)
    assert words in text
    assert "things are wrong" not in text
    assert text.startswith(str(tmp_path / "own.yaml"))


def test_every_family_that_something_is_known_of_can_be_named() -> None:
    known = {*FITTED_FAMILIES, *MULTIPROCESSORS, *WITHOUT_TILES, *WATTS, *constants().families}
    assert known | {accelerator.family for accelerator in accelerators()} | {"other"} == set(FAMILIES)
    docs = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    assert ", ".join(FAMILIES) in docs.replace("`", "")


def test_a_complaint_names_the_line(tmp_path: Path) -> None:
    assert "own.yaml line 6)" in complaint(tmp_path, bandwidth_tb_s=3350)


def test_several_faults_are_said_at_once(tmp_path: Path) -> None:
    text = complaint(tmp_path, bandwidth_tb_s=0, peak_tflops=None, matmul_tflops=None, watts="much")
    assert "3 things are wrong" in text


def test_a_file_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        by_name(str(tmp_path / "absent.yaml"))


def test_the_documented_file_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    example = text.partition("```yaml\nname: my-card")[2].partition("```")[0]
    file = tmp_path / "documented.yaml"
    file.write_text(f"name: my-card{example}")
    found = read_entry(file)
    assert set(QUANTITIES) | {"peak_tflops", "matmul_tflops"} <= set(found.confidence)
    assert found.measured is not None
    assert found.measured.network == pytest.approx(47.5e9)


MEASURED = GOOD | {
    "measured": {
        "copy_tb_s": 4.27,
        "host_gb_s": {"to": 55, "from": 50},
        "network_gb_s": 47.5,
        "attention_tflops": {"forward": 563, "backward": 488},
        "products": [{"format": "bf16", "m": 8192, "n": 4096, "k": 6144, "tflops": 789}],
        "collectives": [{"kind": "all-reduce", "ranks": 2, "mib": 512, "ms": 1.845}],
    }
}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    accelerator = accelerator_of(MEASURED)
    write_entry(tmp_path / "own.yaml", accelerator)
    again = read_entry(tmp_path / "own.yaml")
    assert entry_of(again) == entry_of(accelerator) | {"confidence": dict(again.confidence)}


@pytest.mark.parametrize("accelerator", accelerators(), ids=lambda each: each.name)
def test_an_entry_says_all_that_there_is_to_say(accelerator: Accelerator) -> None:
    entry = entry_of(accelerator)
    again = accelerator_of(entry)
    assert list(faults(entry)) == []
    assert entry_of(again) == entry
    assert (again.peak, again.matmul) == (pytest.approx(accelerator.peak), pytest.approx(accelerator.matmul))
    assert again.memory == pytest.approx(accelerator.memory, rel=1e-5)


def test_what_was_measured_is_read_with_its_units() -> None:
    entry = MEASURED
    assert list(faults(entry)) == []
    found = accelerator_of(entry).measured
    assert found is not None
    assert (found.copy, found.host["to"], found.attention["backward"]) == pytest.approx((4.27e12, 55e9, 488e12))
    assert found.network == pytest.approx(47.5e9)
    assert found.products[0].rate == pytest.approx(789e12)
    assert (found.collectives[0].bytes, found.collectives[0].seconds) == pytest.approx((2**29, 1.845e-3))
