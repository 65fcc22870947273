"""The time of a step: published runs of presets come out near, and what should make it longer does."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from time import perf_counter
from typing import Any

import pytest

from fivefold.config.models import preset_fields
from fivefold.config.run import Batch, Data, Model, Parallel, Precision, Recompute, Run
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name
from fivefold.pipeline.named import make_schedule, placement_of
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.times import Times
from fivefold.plan.cluster import Cluster, cluster
from fivefold.plan.software import STACKS, Software, stack
from fivefold.plan.time.pipeline import pipeline_seconds
from fivefold.plan.time.step import StepTime, step_time
from fivefold.plan.time.work import Communication, Sizes, layer_work


def step(
    preset: str,
    machines: Cluster,
    software: Software | None = None,
    seq_len: int = 8192,
    batch: int = 64,
    micro: int = 1,
    recompute: Any = "none",
    linear: Any = "auto",
    model: dict[str, Any] | None = None,
    **parallel: Any,
) -> StepTime:
    run = Run(
        name="timed",
        steps=1,
        model=Model.model_validate(dict(preset_fields(preset).value) | (model or {})),
        data=Data(train=[], seq_len=seq_len),
        batch=Batch(global_size=batch, micro_size=micro),
        parallel=Parallel(**parallel),
        recompute=Recompute(mode=recompute),
        precision=Precision(linear=linear),
    )
    return step_time(run, machines, software)


def gpus(name: str, count: int, nic_gbit_s: float | None = None) -> Cluster:
    return cluster(by_name(name), count, nic_gbit_s=nic_gbit_s)


def test_bloom_takes_what_its_authors_measured_with_the_software_of_its_time() -> None:
    split = [5, *[6] * 10, 5]
    found = step(
        "bloom-176b", gpus("A100-SXM-80GB", 384, 50), stack("deepspeed-2022"), 2048, 2048, 2, "full",
        tp=4, pp=12, dp=8, zero=1, layers_per_stage=split,
    )  # fmt: skip
    assert found.seconds == pytest.approx(104.7, rel=0.15)


@pytest.mark.parametrize(
    ("seq_len", "cp", "dp", "batch", "tflops"), [(8192, 1, 128, 2048, 400), (131072, 16, 8, 128, 380)]
)
def test_llama_405b_reaches_what_its_authors_measured_at_both_lengths(
    seq_len: int, cp: int, dp: int, batch: int, tflops: float
) -> None:
    split = [0, *[1] * 126, 0]
    found = step(
        "llama-3-405b", gpus("h100", 16384, 400), None, seq_len, batch,
        tp=8, pp=16, cp=cp, dp=dp, zero=2, schedule="interleaved", chunks=8, layers_per_stage=split,
    )  # fmt: skip
    assert found.mfu * 989 == pytest.approx(tflops, rel=0.15)


def test_deepseek_v3_takes_the_gpu_hours_of_its_report_with_the_exchange_beside_computation() -> None:
    found = step(
        "deepseek-v3", gpus("h800", 2048, 400), stack("megatron-2026"), 4096, 15360, linear="fp8-block",
        tp=1, pp=16, dp=128, ep=64, zero=1, schedule="dualpipe-v", chunks=2,
    )  # fmt: skip
    hours = 14.8e12 / found.tokens_per_s * 2048 / 3600
    assert hours == pytest.approx(2.664e6, rel=0.15)


@pytest.mark.parametrize(
    ("layout", "measured"),
    [
        ({"dp": 1, "zero": 1}, 19252),
        ({"dp": 2, "zero": 2}, 18244),
        ({"dp": 2, "zero": 3}, 17705),
        ({"dp": 1, "tp": 2}, 18269),
    ],
)
def test_our_own_speed_on_h200s_is_predicted_without_having_been_fitted(
    layout: dict[str, int], measured: float
) -> None:
    ranks = layout["dp"] * layout.get("tp", 1)
    micro = layout.get("tp", 1)
    found = step(
        "llama-3-8b", gpus("h200", ranks), None, 8192, layout["dp"] * micro, micro,
        model={"layers": 16, "vocab": 128256}, **layout,
    )  # fmt: skip
    assert found.tokens_per_s / ranks == pytest.approx(measured, rel=0.1)


def test_the_parts_sum_to_the_step_and_the_shares_lie_inside_it() -> None:
    found = step("llama-3-70b", gpus("h100", 64), tp=4, pp=4, dp=4, chunks=2, schedule="interleaved")
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert 0 < found.exposed <= found.communication < 1
    assert 0 < found.bubble < 1
    assert found.tokens_per_s == pytest.approx(64 * 8192 / found.seconds)


def test_full_recompute_costs_about_a_forward() -> None:
    plain, again = (step("llama-3-8b", gpus("h100", 8), dp=8, zero=2, recompute=mode) for mode in ("none", "full"))
    assert 1.25 < again.seconds / plain.seconds < 1.4


def test_products_in_fp8_are_faster_and_not_twice_as_fast() -> None:
    wide, narrow = (step("llama-3-70b", gpus("h100", 64), tp=8, dp=8, linear=each) for each in ("auto", "fp8-tensor"))
    assert 1.1 < wide.seconds / narrow.seconds < 2


def test_more_microbatches_make_the_bubble_smaller() -> None:
    few, many = (step("llama-3-70b", gpus("h100", 64), tp=4, pp=8, dp=2, batch=batch) for batch in (16, 256))
    assert few.bubble > 3 * many.bubble


def test_tensor_parallelism_across_nodes_is_slower_than_inside() -> None:
    inside = step("llama-3-70b", gpus("h100", 64, 100), tp=8, dp=8)
    across = step("llama-3-70b", gpus("h100", 64, 100), tp=16, dp=4, model={"kv_heads": 16})
    assert across.seconds > 1.5 * inside.seconds


def test_a_slow_network_costs_zero_3_more_than_zero_1() -> None:
    slow = gpus("h100", 64, 25)
    once, reduced, gathered = (step("llama-3-8b", slow, dp=64, zero=zero, batch=512) for zero in (1, 2, 3))
    assert gathered.seconds > 1.3 * once.seconds
    assert gathered.parts["zero"] > 1.5 * reduced.parts["zero"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_sum_their_pieces_over_the_network_once_a_step(zero: int) -> None:
    """A rank's eighth of the fp32 gradients over 8 nodes: 7.0 GB there and back, of which a backward hides little."""

    def seconds(nic: float, batch: int) -> float:
        machines = gpus("h100", 64, nic)
        return step("llama-3-8b", machines, dp=64, replicate=1 if zero == 0 else 8, zero=zero, batch=batch).seconds

    slower = seconds(1, 64) - seconds(400, 64)
    pieces = 2 * 7 / 8 * 8.03e9 * 4 / 8 / (1e9 / 8 * 0.7961)
    if zero == 2 or zero == 3:
        assert slower == pytest.approx(pieces, rel=0.05)
    assert slower > 0.9 * pieces
    assert seconds(1, 128) - seconds(400, 128) == pytest.approx(slower, rel=0.02)


def test_more_tokens_never_take_less_time_however_little_is_hidden() -> None:
    """ZeRO 3 gathers weights and reduces gradients beside one and the same backward, not each beside all of it."""
    times = [step("llama-3-8b", gpus("h100", 8), seq_len=n, zero=3, dp=8).seconds for n in (128, 256, 512, 1024, 2048)]
    assert times == sorted(times)


def test_software_that_sends_a_row_once_a_node_has_less_to_send() -> None:
    """Of 8 experts a token on 8 nodes 5.34 nodes are reached, so that 0.67 of the rows cross the network."""
    machines = gpus("h100", 64, 50)
    each, node, rank = (
        step("qwen3-30b-a3b", machines, replace(stack("fivefold"), ep_once=once), 4096, 256, dp=64, ep=64).parts["ep"]
        for once in ("choice", "node", "rank")
    )
    missed = prod((112 - number) / (128 - number) for number in range(8))
    assert stack("fivefold").ep_once == "rank"
    assert node / each == pytest.approx(1 - missed, rel=0.03)
    assert 1 < rank / node < 1.1  # then the rows are spread inside the node, over links that are much faster


def test_a_row_for_several_experts_of_a_rank_is_sent_there_once() -> None:
    """Nearly every token with 8 of 128 experts has some on each of two ranks: one row goes, where four went."""
    each, once = (
        step("qwen3-30b-a3b", gpus("h200", 2), replace(stack("fivefold"), ep_once=once), 65536, 2, dp=2, ep=2)
        for once in ("choice", "rank")
    )
    assert once.parts["ep"] / each.parts["ep"] == pytest.approx(1.994 / 8, rel=0.05)


def test_rows_travel_beside_shared_experts_where_there_are_any() -> None:
    ours, waiting = stack("fivefold"), replace(stack("fivefold"), shared_meanwhile=False)

    def exposed(software: Software, shared: int) -> float:
        moe = {"experts": 16, "top_k": 2, "ffn": 4096, "shared": shared}
        model = {"layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 4096, "moe": moe}
        return step("llama-3-8b", gpus("h100", 8), software, 4096, 8, model=model, dp=8, ep=8).parts["ep"]

    assert exposed(ours, 1) < 0.8 * exposed(waiting, 1)
    assert exposed(ours, 0) == exposed(waiting, 0) == exposed(waiting, 1)


def test_a_ring_sends_keys_and_values_twice_in_backward_and_ulysses_all_heads_once() -> None:
    """Bytes by hand of a layer of Llama 3 8B on a rank of cp 4: 4,096 positions, 32 heads of 128 and 8 for keys."""

    def work(method: Any) -> Communication:
        run = Run(
            name="long",
            steps=1,
            model=Model.model_validate(dict(preset_fields("llama-3-8b").value)),
            data=Data(train=[], seq_len=16384),
            batch=Batch(global_size=1, micro_size=1),
            parallel=Parallel(cp=4, cp_method=method),
        )
        (found,) = (
            each for each in layer_work(Sizes.of(run, stack("fivefold")), 0).communications if each.axis == "cp"
        )
        return found

    ring, heads = work("ring"), work("ulysses")
    assert (ring.kind, ring.bytes, ring.backward) == ("all-gather", 16384 * 2 * 8 * 128 * 2, 2)
    assert (heads.kind, heads.bytes) == ("all-to-all", 4096 * 2 * (32 + 8) * 128 * 2)
    assert heads.bytes * heads.backward == 4096 * (3 * 32 + 2 * 8) * 128 * 2


def test_tokens_for_experts_of_other_nodes_cross_a_slow_network_slowly() -> None:
    fast, slow = (step("qwen3-30b-a3b", gpus("h100", 32, nic), dp=32, ep=32, seq_len=4096) for nic in (400, 50))
    assert slow.parts["ep"] > 3 * fast.parts["ep"]


def test_heads_that_8_does_not_divide_slow_unfused_attention_alone() -> None:
    def seconds(heads: int, software: str) -> float:
        model = {"heads": heads, "head_dim": 14336 // 112}
        return step(
            "bloom-176b", gpus("A100-SXM-80GB", 384, 50), STACKS[software], 2048, 2048, 2, "full", model=model,
            tp=4, pp=12, dp=8, layers_per_stage=[5, *[6] * 10, 5],
        ).seconds  # fmt: skip

    unfused, fused = (seconds(104, name) / seconds(96, name) for name in ("deepspeed-2022", "fsdp-2023"))
    assert unfused > fused + 0.04


@pytest.mark.parametrize("microbatches", [8, 13, 40])
@pytest.mark.parametrize(
    ("name", "chunks", "within"),
    [("1f1b", 1, 1e-9), ("interleaved", 2, 0.02), ("interleaved", 4, 0.03), ("zb-h1", 1, 1e-9), ("zb-h2", 1, 1e-9)],
)
def test_the_pipeline_takes_what_the_simulator_says(name: str, chunks: int, within: float, microbatches: int) -> None:
    placement = placement_of(name, 4, chunks)
    stages = [(1.0, 1.1, 0.9)] * len(placement)
    forward, input, weight = zip(*stages, strict=True)
    schedule = make_schedule(name, 4, microbatches, chunks)
    exact = simulate(schedule, Times(forward, input, weight)).makespan
    assert pipeline_seconds(name, placement, microbatches, stages) == pytest.approx(exact, rel=within)


def test_a_slow_last_stage_holds_the_pipeline_up_once_a_microbatch() -> None:
    stages = [(1.0, 1.0, 1.0)] * 3 + [(2.0, 2.0, 2.0)]
    assert pipeline_seconds("1f1b", (0, 1, 2, 3), 10, stages) == pytest.approx(3 * 3 + 6 + 9 * 6)


def test_a_format_that_the_accelerator_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="A100-SXM-80GB has no products in fp8"):
        step("llama-3-8b", gpus("A100-SXM-80GB", 8), dp=8, linear="fp8-block")
    with pytest.raises(UserError, match="no software called"):
        stack("megatron-1999")


def test_a_prediction_takes_a_few_milliseconds() -> None:
    machines = gpus("h100", 1024)
    step("llama-3-405b", machines, tp=8, pp=16, dp=8, batch=1024)
    start = perf_counter()
    for micro in (1, 2, 4):
        step("llama-3-405b", machines, tp=8, pp=16, dp=8, batch=1024, micro=micro)
    assert perf_counter() - start < 0.5
