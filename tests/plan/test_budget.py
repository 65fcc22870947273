"""The budget: the figures that everybody quotes come out, each by a formula that is written down."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from fivefold.config.models import preset_fields
from fivefold.config.run import Model, Precision
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name
from fivefold.plan.budget import (
    MIXED,
    Budget,
    budget,
    budget_of,
    given_tokens,
    microbatches_for,
    optimal_tokens,
    state_named,
    state_of,
    zero_bytes,
)
from fivefold.plan.software import StateBytes
from tests.plan.runs import llama_405b

H100 = by_name("h100")


@pytest.fixture(scope="module")
def two_trillion() -> Budget:
    return budget(2e12, given_tokens(40e12), H100)


def test_two_trillion_parameters_hold_32_tb_of_state_which_fills_400_h100s(two_trillion: Budget) -> None:
    assert two_trillion.state.total == 16
    assert two_trillion.state_bytes == pytest.approx(32e12, rel=1e-12)
    assert two_trillion.state_gpus == 400


def test_forty_trillion_tokens_on_them_are_4_8e26_flops_and_30800_h100_years(two_trillion: Budget) -> None:
    assert two_trillion.flops == pytest.approx(4.8e26, rel=1e-12)
    assert two_trillion.gpu_years == pytest.approx(30_800, rel=0.005)
    assert two_trillion.gpu_years == pytest.approx(4.8e26 / (0.5 * 989e12) / 86400 / 365.25, rel=1e-9)


def test_zero_3_on_2048_gpus_leaves_16_gb_of_state_on_each(two_trillion: Budget) -> None:
    each = two_trillion.state_bytes_a_gpu(zero=3, ranks=2048)
    assert each == pytest.approx(32e12 / 2048, rel=1e-12)
    assert round(each / 1e9) == 16


@pytest.mark.parametrize(("zero", "each"), [(0, 16.0), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
def test_the_state_a_gpu_is_that_of_the_zero_paper(zero: int, each: float) -> None:
    """7.5B parameters on 64 GPUs: 120, 31.4, 16.6 and 1.9 GB."""
    assert zero_bytes(MIXED, 7.5e9, zero, 64) == pytest.approx(each * 7.5e9)


def test_zero_2_shards_the_gradients_and_not_the_weights_and_never_what_a_stack_holds_beside() -> None:
    assert zero_bytes(state_named("megatron"), 1e9, 2, 64) == pytest.approx((2 + 16 / 64) * 1e9)
    assert zero_bytes(StateBytes(2, 2, 12, extra=3), 1e9, 3, 64) == pytest.approx((3 + 16 / 64) * 1e9)


def test_sixteen_ranks_need_about_1500_microbatches_for_a_bubble_of_one_percent() -> None:
    need = microbatches_for(16, 0.01)
    assert (need.of_work, need.of_step) == (1500, 1485)
    assert microbatches_for(16, 0.01, chunks=2).of_work == 750
    assert microbatches_for(1, 0.01).of_step == 1


def test_a_bubble_within_the_need_is_no_larger_and_one_microbatch_less_is_larger() -> None:
    for pp, bubble in ((4, 0.1), (12, 0.03), (16, 0.07)):
        need = microbatches_for(pp, bubble).of_step
        assert (pp - 1) / (need + pp - 1) <= bubble < (pp - 1) / (need + pp - 2)


def test_dense_tokens_are_20_a_parameter_and_sparse_ones_20_an_active_parameter_with_both_said() -> None:
    assert optimal_tokens(70e9).tokens == 1.4e12
    sparse = optimal_tokens(671e9, 37e9)
    assert sparse.tokens == 20 * 37e9
    assert "by active parameters" in sparse.why
    assert "13.42T" in sparse.why
    assert (sparse.basis, given_tokens(5).basis) == ("assumed", "given")


def test_a_run_is_budgeted_with_its_attention_in_the_format_of_its_products() -> None:
    run = llama_405b().model_copy(update={"steps": None, "tokens": 15.6e12})
    planned = budget_of(run, H100)
    assert planned.parameters == 405_853_388_800
    assert planned.flops == pytest.approx(3.8e25, rel=0.06)  # its authors state 6 N D
    assert planned.flops > 6 * 405.85e9 * 15.6e12 * 0.99
    assert planned.tokens.basis == "given"
    eights = run.model_copy(update={"precision": Precision(linear="fp8-block")})
    assert budget_of(eights, H100).peak == 2 * budget_of(run, H100).peak + 1e12
    with pytest.raises(UserError, match="A100-SXM-80GB has no products in fp8"):
        budget_of(eights, by_name("a100"))


def test_the_tokens_of_a_sparse_run_may_be_the_optimal_number_by_what_a_token_meets() -> None:
    model = Model.model_validate(preset_fields("deepseek-v3").value)
    sparse = budget_of(llama_405b().model_copy(update={"model": model}), H100, optimal=True)
    assert sparse.tokens.tokens == 20 * sparse.active < 20 * sparse.parameters / 10


def test_a_parameters_state_is_16_bytes_and_that_of_a_run_follows_its_master_format() -> None:
    assert MIXED.total == 16
    assert (state_named("megatron").total, state_named("mixed")) == (18, MIXED)
    assert state_of(Precision()) == state_named("fivefold")
    assert state_of(Precision(master="bf16")).total == 8
    assert state_of(Precision(compute="fp64")).total == 32


def test_every_figure_is_explained_with_its_numbers_and_goes_into_json(two_trillion: Budget) -> None:
    text = "\n".join(two_trillion.explain())
    for figure in ("16 bytes", "x 2T", "32 TB", "80 GB", "= 400", "4.8e+26", "9.89e+14 FLOP/s x 50.0%", "30,759"):
        assert figure in text
    assert json.loads(json.dumps(two_trillion.json()))["state_gpus"] == 400
    assert "15 / (1 x 0.01) = 1,500" in "\n".join(microbatches_for(16, 0.01).explain())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: budget(0, given_tokens(1e12), H100), "parameters is 0; give a number above 0"),
        (lambda: budget(float("nan"), given_tokens(1e12), H100), "parameters is nan"),
        (lambda: budget(1e9, given_tokens(-1), H100), "tokens is -1"),
        (lambda: budget(1e9, given_tokens(1e12), H100, active=2e9), "2B active parameters contradict 1B"),
        (lambda: budget(1e9, given_tokens(1e12), H100, efficiency=50), "write 0.5 for 50 %"),
        (lambda: budget(1e9, given_tokens(1e12), H100, efficiency=0), "efficiency is 0"),
        (lambda: microbatches_for(0, 0.01), "parallel.pp is 0"),
        (lambda: microbatches_for(16, 1.5), "write 0.015 for 1.5 %"),
        (lambda: zero_bytes(MIXED, 1e9, 4, 8), "zero is 4"),
        (lambda: zero_bytes(MIXED, 1e9, 3, 0), "shard the state is 0"),
        (lambda: state_named("mixd"), "did you mean mixed"),
    ],
)
def test_what_cannot_be_is_refused_with_the_number_and_what_to_write(wrong: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError) as raised:
        wrong()
    assert says in str(raised.value)
