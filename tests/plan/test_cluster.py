"""The machines of a run, from its `cluster` section and the catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fivefold.config.run import Cluster as Asked
from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name
from fivefold.plan.cluster import cluster, cluster_of, notes_on_nodes
from tests.plan.runs import small_run


def run_on(**asked: Any) -> Run:
    return small_run().model_copy(update={"cluster": Asked(**asked)})


def test_what_a_run_leaves_open_is_the_catalogues() -> None:
    found = cluster_of(run_on(gpu="h100", gpus=16384))
    assert (found.accelerator.name, found.gpus, found.per_node, found.nodes) == ("H100-SXM-80GB", 16384, 8, 2048)
    assert (found.link, found.domain, found.nic, found.price) == (450e9, 8, 50e9, None)


def test_what_a_run_says_counts() -> None:
    found = cluster_of(run_on(gpu="A100-SXM-80GB", gpus=12, gpus_per_node=4, nic_gbit_s=100, price_per_gpu_hour=1.5))
    assert (found.per_node, found.domain, found.nodes) == (4, 4, 3)
    assert (found.nic, found.price) == (12.5e9, 1.5)


def test_links_over_several_nodes_do_not_end_at_a_node() -> None:
    assert cluster_of(run_on(gpu="gb200", gpus=72)).domain == 72
    assert cluster_of(run_on(gpu="gb200", gpus=144, gpus_per_node=4)).domain == 72


def test_a_run_that_fills_no_whole_domains_takes_an_even_share_of_each() -> None:
    filled = {gpus: cluster(by_name("gb200"), gpus).filled for gpus in (8, 72, 144, 128, 256, 1000)}
    assert filled == {8: 72, 72: 72, 144: 72, 128: 64, 256: 64, 1000: 72}  # 40 of each rack would be too few
    assert cluster(by_name("h100"), 12).filled == 8


@pytest.mark.parametrize(
    ("gpu", "gpus", "per_node", "tp", "said"),
    [
        ("h100", 512, None, 8, ()),
        ("h100", 4, None, 4, ()),
        ("h100", 512, 7, 1, ("512 GPUs are 73.1 nodes of 7 (cluster.gpus_per_node)",)),
        ("h100", 512, None, 16, ("tp 16 crosses nodes of 8",)),
        ("h100", 24, 6, 4, ("tp 4 crosses nodes of 6",)),
        ("gb200", 144, None, 8, ()),
        ("gb200", 128, None, 64, ()),
        ("gb200", 144, None, 144, ("tp 144 crosses domains of 72",)),
    ],
)
def test_nodes_that_are_not_filled_and_tp_beyond_a_node_are_noted(
    gpu: str, gpus: int, per_node: int | None, tp: int, said: tuple[str, ...]
) -> None:
    assert notes_on_nodes(cluster(by_name(gpu), gpus, per_node), tp) == said


@pytest.mark.parametrize(
    ("gpu", "gpus", "ep", "across"),
    [
        ("h100", 64, 4, ""),
        ("h100", 64, 32, ""),
        ("h100", 64, 12, "nodes of 8"),
        ("h100", 64, 6, "nodes of 8"),
        ("h100", 8, 6, ""),
        ("gb200", 128, 64, ""),
        ("gb200", 144, 64, "domains of 72"),
    ],
)
def test_experts_that_lie_across_nodes_are_noted(gpu: str, gpus: int, ep: int, across: str) -> None:
    said = f"ep {ep} lies across {across}, so that tokens for its experts cross the network once a rank"
    assert notes_on_nodes(cluster(by_name(gpu), gpus), 1, ep) == ((said,) if across else ())


def test_a_card_without_links_has_none() -> None:
    assert cluster(by_name("l40s"), 8).link == 0
    assert cluster(by_name("h100"), 4, per_node=1).link == 0


def test_the_gpu_may_be_a_file_of_the_users_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("peak_tflops: {bf16: 100}\nmemory_gb: 32\nbandwidth_tb_s: 1.2\nper_node: 2\nnic_gbit_s: 25\n")
    found = cluster_of(run_on(gpu=str(file), gpus=8))
    assert (found.accelerator.name, found.per_node, found.nic) == ("mine", 2, 3.125e9)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"gpus": 8}, ["--gpu NAME", "H100-SXM-80GB", "YAML"]),
        ({"gpu": "h100"}, ["--gpus N"]),
        ({"gpu": "h1o0", "gpus": 8}, ["cluster.gpu = h1o0", "did you mean H100-SXM-80GB"]),
        ({"gpu": "h100", "gpus": 16, "nic_gbit_s": 400e9}, ["400", "in Gbit/s", "do you mean 400?"]),
        ({"gpu": "h100", "gpus": 16, "nic_gbit_s": 0.001}, ["nic_gbit_s = 0.001"]),
        ({"gpu": "tpu-v4", "gpus": 8192}, ["8,192", "4,096", "cluster.nic_gbit_s"]),
    ],
)
def test_what_cannot_be_is_said_with_its_numbers(asked: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        cluster_of(run_on(**asked))
    assert [word for word in words if word not in str(error.value)] == []


def test_a_network_that_is_not_known_is_not_needed_inside_a_domain() -> None:
    assert cluster_of(run_on(gpu="tpu-v4", gpus=4096)).nic == 0
