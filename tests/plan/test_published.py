"""Published rows as runs: what a row says, what is assumed, and which software ran it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import UserError
from fivefold.plan.constants import constants
from fivefold.plan.published.rows import Row, States, read_rows, row_of
from fivefold.plan.published.run import network, split
from fivefold.plan.published.validate import predicted
from fivefold.plan.software import COMPILED, ENGINE, FLASH, LATEST, UNFUSED

ROW: dict[str, Any] = {
    "id": "x-1",
    "source": "somebody 2024",
    "model": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq": 8192},
    "hardware": {"gpu": "H100-SXM-80GB", "count": 16, "per_node": 8, "intra": "NVLink4", "inter": "400 Gb/s/GPU"},
    "layout": {"tp": 2, "pp": 2, "global_batch": 64, "micro_batch": 1, "zero": 1, "recompute": "none"},
    "measured": {"iter_s": 2.0},
}


def row(**changes: dict[str, Any] | str) -> Row:
    made = copy.deepcopy(ROW)
    for section, values in changes.items():
        made[section] = made[section] | values if isinstance(values, dict) else values
    return row_of(made)


@pytest.fixture(scope="module")
def shipped() -> dict[str, Row]:
    return {each.id: each for each in read_rows()}


def test_all_shipped_rows_are_read_and_their_layouts_fill_their_gpus(shipped: dict[str, Row]) -> None:
    assert len(shipped) == 384
    for each in shipped.values():
        parallel = each.run.parallel
        assert parallel.dp != "auto"
        assert parallel.tp * parallel.pp * parallel.cp * parallel.dp == each.cluster.gpus
        assert sum(parallel.layers_per_stage) == each.run.model.layers  # type: ignore[arg-type]


def test_what_is_unsaid_has_its_documented_default_and_is_known_to_be_unsaid() -> None:
    bare = row(layout={"micro_batch": None, "zero": None, "recompute": None}, model={"vocab": None})
    assert bare.run.parallel.dp == 4
    assert (bare.run.batch.micro_size, bare.run.parallel.zero, bare.run.recompute.mode) == (1, 1, "none")
    assert bare.run.model.vocab == 51_200
    assert bare.states == States(micro_batch=False, recompute=False, zero=False, sequence=True, state_bytes=True)
    assert row().states.layout
    assert not row(layout={"recompute": "selective(op SAC)?"}).states.recompute


def test_a_feed_forward_is_gated_unless_it_is_four_widths_or_said_not_to_be() -> None:
    assert row().run.model.activation == "swiglu"
    assert row(model={"ffn": 16384}).run.model.activation == "gelu"
    assert row(model={"act": "squared_relu"}).run.model.activation == "gelu"
    assert row(model={"ffn": 16384, "act": "swiglu"}).run.model.activation == "swiglu"


@pytest.mark.parametrize(
    ("text", "gbit_s"),
    [
        ("8x200Gb/s HDR IB (200 Gb/s/GPU)", 200),
        ("4x OmniPath 100 Gb/s per node", 50),
        ("1600 Gb/s/node RoCE", 200),
        ("RoCE 400 Gb/s/GPU, 3-tier Clos 1:7 oversub at top", 400),
        ("3.2 Tb/s per node", 400),
        ("50 GB/s/GPU", 400),
        ("RoCE RDMA, 4 nodes", None),
        ("not stated", None),
    ],
)
def test_the_network_of_a_gpu_is_read_from_free_text(text: str, gbit_s: float | None) -> None:
    assert network(text, per_node=8) == (None if gbit_s is None else gbit_s * 1e9 / 8)


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (72, 12, [6] * 12),
        (70, 12, [5, *[6] * 10, 5]),
        (126, 16, [7, *[8] * 14, 7]),
        (22, 24, [0, *[1] * 22, 0]),
        (95, 12, [*[8] * 11, 7]),
        (80, 12, [6, 6, *[7] * 8, 6, 6]),
    ],
)
def test_layers_are_shared_out_as_published_runs_do(layers: int, stages: int, counts: list[int]) -> None:
    assert split(layers, stages) == counts


@pytest.mark.parametrize(
    ("schedule", "vpp", "expected"),
    [
        ("1f1b (DeepSpeed)", None, ("1f1b", 1)),
        ("1f1b-interleaved", 4, ("interleaved", 4)),
        ("1F1B-I", "max (1 layer/chunk)", ("interleaved", 16)),
        ("ZB-V", 2, ("zb-v", 2)),
        ("ZB-2p", None, ("zb-h2", 1)),
        ("ZB-1p", None, ("zb-h1", 1)),
        (None, None, ("1f1b", 1)),
    ],
)
def test_a_schedule_is_known_by_the_names_that_papers_give_it(
    schedule: str | None, vpp: int | str | None, expected: tuple[str, int]
) -> None:
    parallel = row(layout={"schedule": schedule, "vpp": vpp}).run.parallel
    assert (parallel.schedule, parallel.chunks) == expected


@pytest.mark.parametrize(
    ("source", "generation"),
    [
        ("bigscience-workshop/bigscience, a section", UNFUSED),
        ("mosaicml/llm-foundry benchmarks", FLASH),
        ("pytorch/torchtitan docs", COMPILED),
        ("NVIDIA/dgxc-benchmarking @v25.05", ENGINE),
        ("a paper (arXiv 2104.04473)", UNFUSED),
        ("a report of 2023", FLASH),
        ("a report of 2026", LATEST),
        ("nobody knows when", ENGINE),
    ],
)
def test_a_source_has_the_kernels_of_its_stack_or_of_its_year(source: str, generation: str) -> None:
    assert row(source=source).software.generation == generation


@pytest.mark.parametrize(
    ("gpu", "generation"),
    [("V100-SXM-32GB", UNFUSED), ("A100-SXM-40GB", FLASH), ("A800-SXM-80GB", FLASH), ("H100-SXM-80GB", ENGINE)],
)
def test_a_source_without_stack_and_year_has_the_kernels_that_its_accelerator_came_with(
    gpu: str, generation: str
) -> None:
    made = row(source="nobody knows when", hardware={"gpu": gpu}, layout={"precision": None})
    assert made.software.generation == generation
    assert made.run.precision.compute == ("fp16" if gpu.startswith("V100") else "bf16")
    assert predicted(made, constants()).seconds > 0


SPARSE = {"n_experts": 8, "topk": 2, "moe_ffn": 14336}


def test_a_dp_that_counts_replicas_of_experts_is_taken_times_ep() -> None:
    """Mixtral with tp 1, pp 8, ep 8, dp 1 on 64 GPUs was divided by a group of no rank."""
    mixtral: dict[str, Any] = {"tp": 1, "pp": 8, "ep": 8, "dp": 1}
    made = row(model={"moe": SPARSE}, layout=mixtral, hardware={"count": 64})
    assert (made.run.parallel.dp, made.run.parallel.ep) == (8, 8)
    assert predicted(made, constants()) == predicted(
        row(model={"moe": SPARSE}, layout=mixtral | {"dp": 8}, hardware={"count": 64}), constants()
    )
    with pytest.raises(UserError, match=r"tp x pp x cp x dp = 8 \(x ep = 64\), and count = 48"):
        row(model={"moe": SPARSE}, layout=mixtral, hardware={"count": 48})
    with pytest.raises(UserError, match="ep = 8 does not divide dp x cp x tp = 1"):
        row(model={"moe": SPARSE}, layout=mixtral, hardware={"count": 8})
    with pytest.raises(UserError, match="ep = 3 does not divide n_experts = 8"):
        row(model={"moe": SPARSE}, layout=mixtral | {"ep": 3, "dp": 3}, hardware={"count": 24})


def test_whole_numbers_may_have_a_point() -> None:
    """Tables with empty cells are written so."""
    made = row(layout={"tp": 2.0, "vpp": 2.0, "zero": 3.0}, model={"layers": 32.0}).run
    assert (made.parallel.tp, made.parallel.chunks, made.parallel.zero, made.model.layers) == (2, 2, 3, 32)


def test_a_row_that_says_how_attention_was_computed_is_believed() -> None:
    assert row(source="megatron-core", model={"attention": "unfused"}).software.generation == UNFUSED
    assert row(source="bigscience", model={"attention": "flash"}).software.generation == FLASH


def test_the_release_of_a_container_decides_between_the_last_two_generations(shipped: dict[str, Row]) -> None:
    bridge = [each for each in shipped.values() if each.id.startswith("mbridge-") and each.id[-1].isdigit()]
    assert {each.software.generation for each in bridge if "-26.08" in each.id[-6:]} == {LATEST}
    assert {each.software.generation for each in bridge if "-25.09" in each.id[-6:]} == {ENGINE}


def test_times_come_from_seconds_or_tokens_or_samples_and_never_from_tflops() -> None:
    assert row().seconds == 2.0
    assert row(measured={"iter_s": None, "tok_s_gpu": 1024}).seconds == 64 * 8192 / (1024 * 16)
    assert row(measured={"iter_s": None, "samples_gpu_s": 2}).seconds == 2.0
    assert row(measured={"iter_s": None, "tflops_per_gpu": 400, "mfu": 40}).seconds is None


def test_doubtful_rows_are_marked(shipped: dict[str, Row]) -> None:
    doubtful = {each.id.split("-h1")[0] for each in shipped.values() if each.doubtful}
    assert {"bigscience-037", "bigscience-014", "bigscience-052", "tt-8b-h200-4n", "tt-8b-h200-8n"} <= doubtful
    assert sum(each.doubtful for each in shipped.values()) == 18


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "no JSON"), ("{}", "no list"), ('[{"id": "a"}]', "row a"), ("[7]", "row 0")],
)
def test_a_file_of_another_form_is_refused_with_the_row(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "runs.json"
    file.write_text(text)
    with pytest.raises(UserError, match=says):
        read_rows(file)


def test_a_row_with_an_unknown_gpu_is_refused_with_near_names(tmp_path: Path) -> None:
    wrong = copy.deepcopy(ROW)
    wrong["hardware"]["gpu"] = "H10O-SXM"
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([wrong]))
    with pytest.raises(UserError, match="H100"):
        read_rows(file)
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(tmp_path / "none.json")
