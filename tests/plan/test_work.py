"""A model's work by operation: its FLOPs are those of the one convention, on any layout."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest

from fivefold.config.models import preset_fields, preset_names
from fivefold.config.run import Batch, Data, Model, Parallel, Run
from fivefold.model.spec import EXPERTS, forward_flops_per_token, layer_shapes
from fivefold.plan.software import STACKS, fivefold
from fivefold.plan.time.work import Sizes, Work, keys_a_query, layer_work, stage_works


def run_of(model: Model, micro: int = 1, seq_len: int = 512, **parallel: int) -> Run:
    return Run(
        name="work",
        steps=1,
        model=model,
        data=Data(train=[], seq_len=seq_len),
        batch=Batch(global_size=8, micro_size=micro),
        parallel=Parallel(**{"dp": 1} | parallel),  # type: ignore[arg-type]
    )


def preset(name: str) -> Model:
    fields = dict(preset_fields(name).value)
    return Model.model_validate(fields | ({"vocab": 32000} if fields.get("vocab", "auto") == "auto" else {}))


def works_of(run: Run) -> list[tuple[Work, int]]:
    sizes = Sizes.of(run, fivefold())
    return stage_works(sizes, range(run.model.layers), first=True, last=True)


@pytest.mark.parametrize("name", preset_names())
def test_the_operations_of_every_preset_sum_to_the_flops_of_the_convention(name: str) -> None:
    model = preset(name)
    flops = sum(Fraction(work.flops) * count for work, count in works_of(run_of(model, micro=2)))
    assert float(flops) == pytest.approx(forward_flops_per_token(model, 512) * 2 * 512, rel=1e-12)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {"tp": 4, "cp": 2}])
@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "qwen3-30b-a3b"])
def test_the_ranks_of_tp_and_cp_share_the_flops_out(name: str, layout: dict[str, int]) -> None:
    model = preset(name)
    flops = sum(work.flops * count for work, count in works_of(run_of(model, **layout)))
    assert flops * prod(layout.values()) == pytest.approx(forward_flops_per_token(model, 512) * 512, rel=1e-12)


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b"])
def test_a_layers_parameters_are_those_of_the_built_one_but_for_small_norms(name: str) -> None:
    model = preset(name)
    work = layer_work(Sizes.of(run_of(model), fivefold()), model.layers - 1)
    shapes = layer_shapes(model, model.layers - 1)
    experts = sum(prod(shape) for name, shape in shapes.items() if EXPERTS in name)
    dense = sum(prod(shape) for name, shape in shapes.items() if EXPERTS not in name)
    assert work.experts == experts
    assert work.parameters == pytest.approx(dense, rel=1e-3)


def test_experts_are_shared_out_and_their_rows_sent_only_with_ep() -> None:
    model = preset("qwen3-30b-a3b")
    alone, spread = (layer_work(Sizes.of(run_of(model, ep=ep, dp=8), fivefold()), 0) for ep in (1, 8))
    assert spread.experts == alone.experts / 8
    assert spread.flops == alone.flops
    sent = [each.bytes for each in spread.communications if each.axis == "ep"]
    assert sent == [512 * 8 * 2048 * 2] * 2
    assert not any(each.bytes for each in alone.communications)


def test_a_sliding_window_leaves_fewer_keys_to_a_query_in_the_layers_that_have_it() -> None:
    model = preset("llama-3-8b").model_copy(update={"options": {"sliding_window": 128, "sliding_every": 2}})
    assert keys_a_query(model, 4096, layer=1) == 2048
    assert keys_a_query(model, 4096, layer=0) == 128 - 128 * 128 / (2 * 4096)
    assert keys_a_query(model, 128, layer=0) == 64
    sizes = Sizes.of(run_of(model, seq_len=4096), fivefold())
    assert layer_work(sizes, 0).flops < layer_work(sizes, 1).flops


def test_unfused_attention_moves_its_scores_and_flash_attention_does_not() -> None:
    run = run_of(preset("bloom-176b"), tp=4, seq_len=2048)
    unfused = layer_work(Sizes.of(run, STACKS["megatron-2022"]), 0)
    fused = layer_work(Sizes.of(run, fivefold()), 0)
    scores = 2048 * 2048 * 112 / 4
    assert next(each.bytes for each in unfused.operations if each.name == "softmax") == 6 * scores
    assert unfused.flops == fused.flops
    assert next(each.bytes for each in fused.operations if each.name == "attention") < scores


def test_without_sequence_parallelism_pointwise_operations_run_on_all_tokens() -> None:
    run = run_of(preset("llama-3-8b"), tp=8)
    parallel, plain = (layer_work(Sizes.of(run, software), 0) for software in (fivefold(), STACKS["deepspeed-2022"]))
    norms = [next(op.bytes for op in work.operations if op.name == "ffn_norm") for work in (parallel, plain)]
    assert norms[1] == 8 * norms[0]
    assert [each.kind for each in plain.communications] == ["all-reduce"] * 2
    assert [each.kind for each in parallel.communications] == ["all-gather", "reduce-scatter"] * 2
