"""Measuring an accelerator: on a CPU, in sizes that only show that it can be done, and what comes of the figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fivefold import cli
from fivefold.errors import UserError
from fivefold.hardware import bench_compute, bench_exchange
from fivefold.hardware.accelerator import Collective, Measured, Product
from fivefold.hardware.bench import bench, entry_from, unknown
from fivefold.hardware.catalogue import by_name
from fivefold.hardware.entry import entry_of, faults, read_entry, write_entry
from fivefold.hardware.stopwatch import Stopwatch
from fivefold.launch.bench import lines, start_bench
from fivefold.plan.cluster import cluster
from fivefold.plan.time.network import Group, collective_seconds, constants_of
from tests.ranks import Crew, crew

CPU = torch.device("cpu")
BRIEF = 1e-3  # seconds for each piece of work: a call or two


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with crew(tmp_path_factory.mktemp("crew")) as ranks:
        yield ranks


def measured_together() -> tuple[object, str]:
    found = bench(CPU, BRIEF)
    return found.accelerator, found.backend


def exchange_over_a_network() -> tuple[float | None, int]:
    """As if each rank were alone on its node."""
    watch = Stopwatch(CPU, BRIEF, together=True)
    return bench_exchange.network(watch, per_node=1), len(bench_exchange.collectives(watch, per_node=1))


def test_two_ranks_measure_themselves_and_what_they_exchange(pair: Crew, tmp_path: Path) -> None:
    (first, backend), (second, _) = pair.run(2, measured_together)
    assert first == second  # the slowest rank's figures, on all ranks
    assert list(faults(entry_of(first))) == []
    write_entry(tmp_path / "cpu.yaml", first)
    again = read_entry(tmp_path / "cpu.yaml")
    assert entry_of(again) == entry_of(first) | {"confidence": dict(again.confidence)}
    kinds = {each.kind for each in again.measured.collectives}
    assert kinds == set(bench_exchange.KINDS)
    assert set(again.matmul) == {"fp32", "bf16"}
    assert set(again.measured.attention) == {"forward", "backward"}
    assert again.measured.attention_format == "fp32"
    text = "\n".join(lines(again, None, backend))
    assert "not in the catalogue" in text
    assert "all-to-all of 4 MiB on 2 ranks" in text

    planned = cluster(again, 2)
    large = next(each for each in again.measured.collectives if each.kind == "all-reduce" and each.bytes > 2**20)
    seconds = collective_seconds("all-reduce", large.bytes, Group(2), planned)
    assert 0 < seconds < 100 * large.seconds


def test_ranks_of_different_nodes_measure_the_network_between_them(pair: Crew) -> None:
    (rate, inside), (other, _) = pair.run(2, exchange_over_a_network)
    assert rate == other
    assert rate is not None
    assert rate > 0
    assert inside == 0


def test_a_stopwatch_takes_the_time_of_a_call_within_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("fivefold.hardware.stopwatch.time.perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += 0.001 if clock[0] else 5.0  # the first call compiles

    assert Stopwatch(CPU, 0.1).seconds(work) == pytest.approx(0.001)
    assert clock[0] == pytest.approx(5.1, abs=0.01)


def test_a_product_counts_each_product_and_sum() -> None:
    class Second(Stopwatch):
        def seconds(self, work: object) -> float:
            return 1.0

    found = bench_compute.products(Second(CPU, BRIEF))
    assert [each.rate for each in found if each.format == "fp32"] == [
        2 * m * n * k for m, n, k in bench_compute.CPU_SHAPES
    ]
    attention, _ = bench_compute.attention(Second(CPU, BRIEF))
    assert attention["forward"] == 2 * 2 * 256 * 256 * 32  # two heads; two products, half of each
    assert bench_compute.copy(Second(CPU, BRIEF)) == 2 * bench_compute.COPY_BYTES_ON_CPU


def test_an_fp8_product_is_the_product() -> None:
    left, right = torch.randn(32, 64), torch.randn(48, 64)
    try:
        found = bench_compute._fp8_product(left, right)()
    except NotImplementedError:
        pytest.skip("this build of torch multiplies in fp8 on a GPU only")
    wanted = left.to(torch.float8_e4m3fn).float() @ right.to(torch.float8_e4m3fn).float().t()
    assert torch.allclose(found.float(), wanted, rtol=1e-2, atol=1e-1)


MEASURED = Measured(
    copy=4.27e12,
    host={"to": 55e9, "from": 52e9},
    attention={"forward": 563e12, "backward": 488e12},
    products=(Product("bf16", 8192, 4096, 6144, 789e12), Product("bf16", 4096, 4096, 4096, 700e12)),
    collectives=(Collective("all-reduce", 2, 2**20, 40e-6), Collective("all-reduce", 2, 2**29, 1.845e-3)),
)


def test_a_known_accelerator_keeps_its_datasheet_and_gains_what_was_measured() -> None:
    known = by_name("h200")
    found, notes = entry_from(known, MEASURED)
    assert notes == []
    assert (found.name, found.family) == ("H200-SXM-141GB-measured", "H100")
    assert (found.peak, found.bandwidth, found.link) == (known.peak, known.bandwidth, known.link)
    assert (found.matmul["bf16"], found.matmul["fp8"]) == (789e12, known.matmul["fp8"])
    assert found.confidence["matmul_tflops"] == "measured"
    assert "fivefold bench" in found.sources[-1]
    assert list(faults(entry_of(found))) == []
    assert constants_of(found).link_efficiency == pytest.approx(291 / 450, rel=0.05)
    assert "80% of 989" in "\n".join(lines(found, known, "cudnn"))


def test_a_device_that_is_faster_than_its_name_is_another_one() -> None:
    found, notes = entry_from(by_name("h100-pcie"), MEASURED)
    assert found.peak["bf16"] == 789e12
    assert found.bandwidth == 4.27e12
    assert len(notes) == 2
    assert "789 TFLOP/s were measured, and H100-PCIe-80GB has 756 at most" in notes[0]
    assert list(faults(entry_of(found))) == []


def test_of_an_unknown_accelerator_what_was_measured_is_all() -> None:
    found, notes = entry_from(unknown("NVIDIA Q1 Ultra", 96 * 2**30, 2, MEASURED), MEASURED)
    assert notes == []
    assert (found.name, found.driver_names) == ("NVIDIA-Q1-Ultra-measured", ("Q1 Ultra",))
    assert (found.peak, found.bandwidth) == ({"bf16": 789e12}, 4.27e12)
    assert (found.domain, found.per_node, found.pcie) == (2, 2, 55e9)
    assert found.link == pytest.approx(2**29 / 1.845e-3)
    assert list(faults(entry_of(found))) == []
    assert "peak_tflops" not in entry_of(found)


@pytest.mark.parametrize(("name", "words"), [("own.txt", "ends in .yaml"), ("absent/own.yaml", "there is no folder")])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, name: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.hardware.bench.bench", None)
    with pytest.raises(UserError, match=words):
        start_bench(tmp_path / name, 1, as_json=False)


def test_the_command_prints_json_alone_on_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.hardware.bench.CPU_BUDGET_S", BRIEF)
    file = tmp_path / "cpu.yaml"
    result = CliRunner().invoke(cli.commands, ["bench", "--nproc", "1", "--out", str(file), "--json"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("{")
    assert f"--gpu {file}" in result.stderr
    assert read_entry(file).measured is not None


@pytest.mark.gpu
def test_a_gpu_measures_itself_within_its_datasheet() -> None:
    found = bench(torch.device("cuda", 0), 0.05)
    assert found.known is not None
    assert found.notes == ()
    assert found.accelerator.matmul["bf16"] > 0.3 * found.known.peak["bf16"]
