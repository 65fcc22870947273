"""The bytes of a stage by arithmetic are those that the model keeps, and those of a rank that is built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fivefold.config.run import Batch, Data, Model, Parallel, Precision, Recompute, Run, Source
from fivefold.kernels.linear import Deferral
from fivefold.model import feed_forward
from fivefold.model.family import family
from fivefold.model.part import Part
from fivefold.pipeline.stage_bytes import ByteCount, StageBytes, sizes_of
from tests.memory import bytes_left
from tests.parity.measure import saved_bytes

GELU = Model(layers=3, hidden=64, heads=8, kv_heads=2, ffn=160, vocab=128, norm="layernorm", activation="gelu")
MODELS = {
    "gelu": GELU,
    "swiglu": GELU.model_copy(update={"activation": "swiglu"}),
    "normed heads": GELU.model_copy(update={"qk_norm": True}),
    "normed embedding": GELU.model_copy(update={"embedding_norm": True}),
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
        batch=Batch(global_size=SEQUENCES, micro_size=SEQUENCES),
        **({"parallel": Parallel(dp=1), "precision": Precision(compute="fp64")} | parts),
    )


def whole(run: Run) -> StageBytes:
    """All of the model as one stage."""
    return ByteCount(run).stage(range(run.model.layers), first=True, last=True)


class Nowhere:
    """Takes gradients and forgets them."""

    def add_product(self, *_: Any) -> None:
        """Of a product."""

    add_rows = add = add_product


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
