"""The catalogue: its figures, the names by which they are found, and that each says where it comes from."""

from __future__ import annotations

import pytest

from fivefold.errors import UserError
from fivefold.hardware.accelerator import Accelerator
from fivefold.hardware.catalogue import accelerators, by_driver_name, by_name
from fivefold.hardware.entry import QUANTITIES

CONFIDENCE = {"measured", "driver", "datasheet", "source", "unchecked"}


def test_h100_is_what_its_datasheet_says() -> None:
    found = by_name("h100")
    assert found.name == "H100-SXM-80GB"
    assert (found.peak["bf16"], found.peak["fp8"], found.peak["fp32"]) == (989e12, 1979e12, 67e12)
    assert (found.bandwidth, found.link, found.domain, found.nic, found.watts) == (3.35e12, 450e9, 8, 50e9, 700)
    assert (found.nominal_memory, round(found.memory / 2**30, 1)) == (80e9, 79.6)
    assert found.matmul_of("bf16") == pytest.approx(794.5e12)
    assert found.matmul_of("fp4") is None


def test_families_join_what_has_the_same_kernels() -> None:
    families = {
        name: by_name(name).family for name in ("a100", "a800", "h100", "h800", "h200", "b200", "gb300", "l40s")
    }
    assert families == {
        "a100": "A100",
        "a800": "A100",
        "h100": "H100",
        "h800": "H100",
        "h200": "H100",
        "b200": "Blackwell",
        "gb300": "Blackwell",
        "l40s": "Ada",
    }


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("H100", "H100-SXM-80GB"),
        ("h100-sxm-80gb", "H100-SXM-80GB"),
        ("H100-96GB-HBM2e-500W (Grand Teton)", "H100-96GB-HBM2e-500W"),
        ("GB200 (NVL72)", "GB200-NVL72"),
        ("gb300", "GB300-NVL72"),
        ("rtx 4090", "RTX-4090"),
        ("v100", "V100-SXM-32GB"),
        ("mi300x", "MI300X"),
        ("nvidia-h100", "H100-SXM-80GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("tesla_v100", "V100-SXM-32GB"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_name_is_found_however_it_is_written(name: str, full: str) -> None:
    assert by_name(name).name == full


@pytest.mark.parametrize(
    ("driver", "full"),
    [
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA H200 NVL", "H200-NVL-141GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA GB200", "GB200-NVL72"),
        ("NVIDIA B300 SXM6 AC", "B300-SXM-288GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM-32GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ],
)
def test_a_driver_is_understood(driver: str, full: str) -> None:
    found = by_driver_name(driver)
    assert found is not None
    assert found.name == full


@pytest.mark.parametrize(
    "driver",
    ["NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40", "NVIDIA A10", "NVIDIA H200 MIG 3g.71gb"],
)
def test_what_only_sounds_like_an_entry_is_none(driver: str) -> None:
    assert by_driver_name(driver) is None


@pytest.mark.parametrize(
    ("name", "near"),
    [("h10", "H100"), ("gb-2000", "GB200"), ("L40", "L40S"), ("h2oo", "H200"), ("nvidia-h10o", "H100")],
)
def test_an_unknown_name_is_refused_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"cluster.gpu = {name}: .*did you mean .*{near}"):
        by_name(name)


def test_names_and_aliases_belong_to_one_entry_each() -> None:
    full = [each.name for each in accelerators()]
    assert len(set(full)) == len(full) >= 26
    assert [each.name for each in accelerators() if by_name(each.name) is not each] == []


@pytest.mark.parametrize("accelerator", accelerators(), ids=lambda each: each.name)
def test_every_figure_says_where_it_comes_from(accelerator: Accelerator) -> None:
    stated = set(accelerator.confidence)
    wanted = {"peak_tflops", "memory_gb", "memory_mib", "bandwidth_tb_s", "link_gb_s", "pcie_gb_s"}
    wanted |= {"matmul_tflops"} if accelerator.matmul else set()
    wanted |= {"nic_gbit_s"} if accelerator.nic else set()
    wanted |= {"watts"} if accelerator.watts else set()
    assert wanted - stated == set()
    assert stated - set(QUANTITIES) - {"peak_tflops", "matmul_tflops"} == set()
    assert set(accelerator.confidence.values()) <= CONFIDENCE
    assert accelerator.sources


def test_a_format_that_an_accelerator_lacks_is_refused_by_name() -> None:
    assert by_name("h100").peak_of("fp16") == by_name("h100").peak_of("bf16")
    with pytest.raises(UserError, match=r"V100-SXM-32GB has no products in bf16 \(it has fp16, fp32\)"):
        by_name("v100").peak_of("bf16")
    with pytest.raises(UserError, match="A100-SXM-80GB has no products in fp8"):
        by_name("a100").peak_of("fp8")


def test_a_mesh_shares_its_links_among_pairs() -> None:
    assert (by_name("mi300x").link, by_name("mi300x").pair) == (448e9, 64e9)
    assert by_name("h100").pair == by_name("h100").link
