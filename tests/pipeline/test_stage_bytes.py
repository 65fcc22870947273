"""The bytes of a stage by arithmetic are those that the model keeps, and those of a rank that is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fivefold.config.run import (
    Batch,
    Data,
    Experts,
    LatentAttention,
    Loss,
    Model,
    Parallel,
    Precision,
    Recompute,
    Run,
    Source,
)
from fivefold.kernels.linear import Deferral
from fivefold.model import feed_forward
from fivefold.model.family import family
from fivefold.model.ledger import Ledger
from fivefold.model.objective import Objective
from fivefold.model.part import Part
from fivefold.pipeline.stage_bytes import ByteCount, StageBytes, sizes_of
from fivefold.pipeline.stages import stage_layers
from fivefold.plan.planned import plan
from tests.memory import bytes_left
from tests.parity.measure import saved_bytes

GELU = Model(layers=3, hidden=64, heads=8, kv_heads=2, ffn=160, vocab=128, norm="layernorm", activation="gelu")
MODELS = {
    "gelu": GELU,
    "swiglu": GELU.model_copy(update={"activation": "swiglu"}),
    "normed heads": GELU.model_copy(update={"qk_norm": True}),
    "normed embedding": GELU.model_copy(update={"embedding_norm": True}),
}
EXPERTS = Experts(experts=6, top_k=2, ffn=48, shared=1, dense_layers=1)
GROUPS = Experts(experts=12, top_k=3, ffn=40, groups=3, top_groups=2, scores="sigmoid", bias=True, scale=2.0)
LATENT = LatentAttention(q_rank=40, kv_rank=24, plain=16, rotated=8, value=16)
GATED = MODELS["swiglu"]
MIXTURES = {
    "experts": GATED.model_copy(update={"moe": EXPERTS}),
    "groups of experts": GATED.model_copy(update={"moe": GROUPS}),
    "latent attention": GATED.model_copy(update={"mla": LATENT}),
    "latent attention from the stream": GATED.model_copy(update={"mla": LATENT.model_copy(update={"q_rank": None})}),
    "two further tokens": GATED.model_copy(update={"mtp": 2}),
    "all of them": GATED.model_copy(update={"moe": EXPERTS, "mla": LATENT, "mtp": 1}),
}
SEQUENCES, SEQ_LEN = 2, 256
TOKENS = torch.arange(SEQUENCES * SEQ_LEN).view(SEQUENCES, SEQ_LEN) % 128


class SavesItsInput(torch.autograd.Function):
    """swiglu, keeping what the GPU kernel keeps: gate and up in one. The CPU's keeps three tensors."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        return d_out.repeat_interleave(2, -1)  # of the right shape: only what is kept is looked at


def run_of(model: Model, **parts: Any) -> Run:
    return Run(
        name="a",
        steps=1,
        model=model,
        data=Data(train=[Source(path="x")], seq_len=SEQ_LEN),
        **(
            {
                "batch": Batch(global_size=SEQUENCES, micro_size=SEQUENCES),
                "parallel": Parallel(dp=1),
                "precision": Precision(compute="fp64"),
            }
            | parts
        ),
    )


def whole(run: Run) -> StageBytes:
    """All of the model as one stage."""
    return ByteCount(run).stage(range(run.model.layers), first=True, last=True)


class Nowhere:
    """Takes gradients and forgets them."""

    def add_product(self, *_: Any) -> None:
        """Of a product."""

    add_rows = add = add_grouped_product = add_product


def training(
    run: Run, deferral: Deferral | None = None, **ranks: Any
) -> tuple[Callable[[], torch.Tensor], torch.nn.Module]:
    """A forward of the run's model in training, and the model; `ranks` are those of its part."""
    model, deferral, objective = run.model, deferral or elsewhere(), Objective.of(run)
    part = Part(recompute=run.recompute, deferral=deferral, expert_deferral=deferral, objective=objective, **ranks)
    built = family(model).build(model, part).double()
    labels = [TOKENS.numel()] * model.mtp
    return lambda: built(TOKENS, TOKENS, ledger=Ledger(model, TOKENS.numel(), labels, TOKENS.device)), built


def elsewhere() -> Deferral:
    """Has the gradients of large weights not come through autograd, as in a pipeline's stages."""
    deferral = Deferral()
    deferral.totals = Nowhere()
    return deferral


@pytest.mark.parametrize("model", MODELS)
def test_what_a_microbatch_keeps_is_what_autograd_saves(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """Within 3 %, the rotary tables and the norms' statistics; on a CPU the norm of heads keeps its output as well."""
    monkeypatch.setattr(feed_forward, "swiglu", SavesItsInput.apply)
    run = run_of(MODELS[model])
    built = family(run.model).build(run.model, Part(deferral=elsewhere())).double()
    found = saved_bytes(built, lambda: built(TOKENS, TOKENS))
    assert found == pytest.approx(whole(run).forward, rel=0.12 if run.model.qk_norm else 0.03)


@pytest.mark.parametrize("model", MIXTURES)
def test_what_experts_latent_attention_and_further_predictions_keep_is_what_autograd_saves(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Within 3 %, as above; on a CPU the norms of short vectors keep their output as well."""
    monkeypatch.setattr(feed_forward, "swiglu", SavesItsInput.apply)
    run = run_of(MIXTURES[model])
    forward, built = training(run)
    assert saved_bytes(built, forward) == pytest.approx(whole(run).forward, rel=0.05 if run.model.mla else 0.03)


@pytest.mark.parametrize("loss", [{"router_z": 0.1}, {"balance_sequence": 0.1}, {"balance_global": 0.1}])
def test_auxiliary_losses_keep_what_they_need_of_the_scores(loss: dict[str, float]) -> None:
    """Beside what routing keeps anyway: logits, or the loads of each token's sequence."""
    model = MIXTURES["experts"].model_copy(update={"moe": Experts(experts=40, top_k=1, ffn=8)})
    plain, more = run_of(model), run_of(model, loss=Loss(**loss))
    found = [saved_bytes(built, forward) for forward, built in map(training, (plain, more))]
    said = [whole(run).forward for run in (plain, more)]
    assert found[1] - found[0] == pytest.approx(said[1] - said[0], rel=0.05, abs=TOKENS.numel() * 8 * 3 * 2)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("model", ["groups of experts", "all of them"])
def test_recompute_of_experts_and_latent_attention_keeps_what_is_said(mode: str, model: str) -> None:
    run = run_of(MIXTURES[model], recompute=Recompute(mode=mode))  # type: ignore[arg-type]
    found, _ = bytes_left(training(run)[0])
    assert found == pytest.approx(whole(run).forward, rel=0.04)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("every", [1, 2])
def test_recompute_keeps_what_is_said(mode: str, every: int) -> None:
    """Counted as memory that forward leaves allocated: notes of what is computed again are no saved tensors."""
    run = run_of(MODELS["gelu"], recompute=Recompute(mode=mode, every=every))  # type: ignore[arg-type]
    built = family(run.model).build(run.model, Part(recompute=run.recompute, deferral=elsewhere())).double()
    found, _ = bytes_left(lambda: built(TOKENS, TOKENS))
    assert found == pytest.approx(whole(run).forward, rel=0.05)


def test_weight_gradients_that_wait_hold_what_is_said() -> None:
    run = run_of(GELU)
    deferral = elsewhere()
    built = family(run.model).build(run.model, Part(deferral=deferral)).double()
    loss = built(TOKENS, TOKENS)
    with deferral.collect() as waiting:
        loss.backward()
    kept = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for g in waiting for tensor in (g.x_ti, g.d_y_to)}
    assert sum(kept.values()) == pytest.approx(whole(run).weight, rel=0.1)


@pytest.mark.parametrize("model", ["groups of experts", "all of them"])
def test_weight_gradients_of_experts_that_wait_hold_what_is_said(model: str) -> None:
    run, waiting = run_of(MIXTURES[model]), elsewhere()
    forward, built = training(run, deferral=waiting)
    loss = forward()
    with waiting.collect() as gradients:
        loss.backward()
    tensors = [value for each in gradients for value in vars(each).values() if isinstance(value, torch.Tensor)]
    parameters = {parameter.data_ptr() for parameter in built.parameters()}
    kept = {x.data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.data_ptr() not in parameters}
    assert sum(kept.values()) == pytest.approx(whole(run).weight, rel=0.01)


def test_ranks_of_ep_keep_the_rows_that_arrive_and_hold_their_share_of_the_experts() -> None:
    model, fp32 = MIXTURES["groups of experts"], Precision(compute="fp32")
    alone, spread = (whole(run_of(model, precision=fp32, parallel=Parallel(dp=4, ep=ep))) for ep in (1, 2))
    tokens = 3 * SEQUENCES * SEQ_LEN  # layers x tokens
    reached = 12 / 7  # of two ranks
    indices = (2 + reached) * 3 + 2  # beside three a choice: places of two kinds here and one there, and sources
    assert spread.forward - alone.forward == pytest.approx(tokens * (reached * 64 * 4 + indices * 8))
    assert spread.weight - alone.weight == pytest.approx(tokens * (reached - 1) * 64 * 4)
    experts = 3 * 12 * 3 * 64 * 40
    assert alone.state - spread.state == (experts - experts / 2) * (4 + 4)  # sharded the same, gathered half


@pytest.mark.parametrize(
    "layout", [{}, {"ep": 2}, {"tp": 2, "cp": 2, "ep": 2}, {"zero": 0, "ep": 2}, {"pp": 2, "tp": 2, "ep": 2}]
)
def test_the_state_of_a_mixture_is_that_of_a_rank_that_is_built(layout: dict[str, int]) -> None:
    """Within 0.2 %: shards are whole rows. The last stage has a copy of the embedding, without moments."""
    run = run_of(MIXTURES["all of them"], parallel=Parallel(**({"dp": 2} | layout)), batch=Batch(global_size=2))
    planned, stages, count = plan(run), stage_layers(run), ByteCount(run)
    rank = planned.grid.world - 1
    built = planned.build_rank(rank)
    state = sum(
        count.stage(layers, number == 0, number == len(stages) - 1).state for number, layers in built.stages.items()
    )
    assert sum(built.bytes.values()) == pytest.approx(state, rel=2e-3)


def test_a_rank_of_tp_and_cp_keeps_its_share_but_gathers_what_waits_in_row_layers() -> None:
    alone, shared = whole(run_of(GELU)), whole(run_of(GELU, parallel=Parallel(dp=1, tp=2, cp=2)))
    assert shared.forward == alone.forward / 4
    tokens, gathered = SEQUENCES * SEQ_LEN * 8, 2 * GELU.hidden * GELU.layers
    assert shared.weight == (alone.weight + tokens * gathered) / 4


def test_offloaded_activations_are_not_on_the_device() -> None:
    run = run_of(GELU)
    offloading = run.model_copy(update={"offload": ["activations"]})
    assert whole(offloading).forward == whole(run).forward - 3 * ByteCount(run).kept(0)


ELEMENTS = 3 * (64 * (8 + 4) * 8 + 64 * 64 + 2 * 64 * 160 + 2 * 64) + 2 * 128 * 64


@pytest.mark.parametrize(
    ("parts", "each"),
    [
        ({"precision": Precision()}, 4 + 4 + 8 + 2 + 4),
        ({"precision": Precision(master="bf16", reduce="bf16")}, 2 + 2 + 4 + 2 + 2),
        ({"precision": Precision(), "parallel": Parallel(dp=4, cp=2)}, 16 / 8 + 2 + 4),
        ({"precision": Precision(), "parallel": Parallel(dp=4, replicate=2)}, 16 / 2 + 2 + 4),
        ({"precision": Precision(), "parallel": Parallel(dp=4, zero=0)}, 16 + 2 + 4),
        ({"precision": Precision(), "offload": ["optimizer"]}, 4 + 4 + 2 + 4),
        ({"precision": Precision(), "offload": ["optimizer", "parameters"]}, 2 + 4),
        ({"precision": Precision(compute="fp64")}, 8 * 6),
    ],
)
def test_state_is_counted_in_its_formats_and_by_its_shards(parts: dict[str, Any], each: float) -> None:
    """Weight, gradient and two moments of the shard; the gathered weight and the unreduced gradient."""
    assert whole(run_of(GELU, **parts)).state == pytest.approx(ELEMENTS * each, rel=1e-3)


def test_zero_3_gathers_one_unit_at_a_time() -> None:
    parts = {"precision": Precision(), "parallel": Parallel(dp=4, zero=3)}
    layer = (ELEMENTS - 2 * 128 * 64) / 3
    assert whole(run_of(GELU, **parts)).state == pytest.approx(ELEMENTS * (16 / 4 + 4) + 2 * layer, rel=1e-3)


def test_sizes_are_those_of_the_stages() -> None:
    sizes = sizes_of([StageBytes(1.0, 2.0, 3.0), StageBytes(4.0, 5.0, 6.0)])
    assert (sizes.forward, sizes.weight, sizes.transient) == ((2.0, 5.0), (3.0, 6.0), (0.0, 0.0))
