"""`fivefold plan --forward`: prefill or validation, by the formulas of a training step, without what training needs."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fivefold.cli import commands
from fivefold.config.files import ConfigError
from fivefold.config.models import preset_fields
from fivefold.config.rules import FORWARD, LEGALITY, OF_TRAINING
from fivefold.config.run import Batch, Cluster, Data, Experts, Model, Parallel, Precision, Run, Source
from fivefold.errors import UserError
from fivefold.model.spec import forward_flops_per_token, layer_shapes, parameters
from fivefold.plan.constants import constants
from fivefold.plan.execution import Execution
from fivefold.plan.forward.forecast import Forward, forward
from fivefold.plan.time.step import step_time

DENSE = Model(layers=8, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, context=32768)
MIXED = DENSE.model_copy(update={"moe": Experts(experts=16, top_k=2, ffn=2048, dense_layers=1)})


def run_of(
    model: Model = DENSE, gpu: str = "h100", gpus: int = 8, seq_len: int = 8192, batch: int = 8, micro: int = 1,
    linear: Any = "auto", **parallel: Any,
) -> Run:  # fmt: skip
    return Run(
        name="passing",
        steps=1,
        cluster=Cluster(gpu=gpu, gpus=gpus),
        model=model,
        data=Data(train=[Source(path=Path("none"))], seq_len=seq_len),
        batch=Batch(global_size=batch, micro_size=micro),
        parallel=Parallel(**parallel),
        precision=Precision(linear=linear),
    )


def planned(*args: Any, **more: Any) -> Forward:
    return forward(run_of(*args, **more))


@pytest.mark.parametrize("tokens", [1_048_576, 1_000_064])
def test_a_million_tokens_of_llama_405b_take_what_was_published(tokens: int) -> None:
    """77 s on 128 H100 with tp in the node, cp over 16 nodes and 8-bit weights (Yang et al. 2024, arXiv 2411.01783)."""
    model = Model.model_validate(dict(preset_fields("llama-3-405b").value) | {"context": 1_048_576})
    found = planned(model, gpus=128, seq_len=tokens, batch=1, linear="fp8-tensor", tp=8, cp=16)
    assert found.time.seconds == pytest.approx(77, rel=0.15)
    assert found.fits
    assert found.memory.worst.parts["keys_and_values"] == 2 * 128 * 2 * 126 * tokens / 16


@pytest.mark.parametrize("parallel", [{"dp": 8}, {"tp": 4}, {"zero": 3}, {"tp": 2, "zero": 3}])
@pytest.mark.parametrize("model", [DENSE, MIXED])
def test_it_takes_the_forwards_of_a_training_step(model: Model, parallel: dict[str, Any]) -> None:
    run = run_of(model, batch=32, micro=2, **parallel)
    found = forward(run)
    trained = step_time(found.run, found.cluster, found.software)
    assert found.time.seconds == pytest.approx(found.microbatches * trained.stages[0][0])
    assert found.time.seconds < 0.45 * trained.seconds
    assert sum(found.time.parts.values()) == pytest.approx(found.time.seconds)


def test_a_pipeline_passes_each_microbatch_down_once() -> None:
    found = planned(batch=64, pp=4, dp=2)
    slowest, hops = max(found.time.stages), 3 * found.time.hop
    first = sum(found.time.stages)
    assert found.microbatches == 32
    assert first + 31 * slowest <= found.time.seconds * 1.001
    assert found.time.seconds <= (first + hops + 31 * slowest) * 1.02
    many = planned(batch=6400, pp=4, dp=2)
    assert many.time.seconds - found.time.seconds == pytest.approx(slowest * (3200 - 32))
    assert many.time.parts["bubble"] == pytest.approx(found.time.parts["bubble"])


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("zb-v", 2), ("gpipe", 1)])
def test_every_placement_of_stages_passes(schedule: str, chunks: int) -> None:
    found = planned(batch=16, pp=4, dp=2, schedule=schedule, chunks=chunks)
    work = sum(found.time.stages) * found.microbatches / 4
    assert work < found.time.seconds < 2.5 * work


def test_keys_and_values_travel_beside_attention() -> None:
    """As much of their exchange is hidden as of any that computation is longer than."""
    found = planned(batch=1, cp=8, seq_len=32768)
    overlap = constants().generations[found.software.generation].overlap
    assert found.time.parts["cp"] == pytest.approx((1 - overlap) * found.time.communication)
    assert found.time.hidden == pytest.approx(overlap * found.time.communication)


def test_mfu_is_of_the_forward_alone() -> None:
    found = planned(batch=32)
    flops = forward_flops_per_token(DENSE, 8192) * 32 * 8192
    assert found.mfu == pytest.approx(flops / (found.time.seconds * 8 * found.cluster.accelerator.peak_of("bf16")))
    assert found.tokens_per_s == pytest.approx(32 * 8192 / found.time.seconds)
    assert 0.4 < found.mfu < 0.8


@pytest.mark.parametrize(
    "parallel", [{"dp": 8}, {"pp": 2, "dp": 4}, {"pp": 4, "dp": 2, "chunks": 2, "schedule": "zb-v"}]
)
@pytest.mark.parametrize("model", [DENSE, MIXED])
def test_the_pipeline_ranks_have_all_weights_once_in_16_bits(model: Model, parallel: dict[str, Any]) -> None:
    found = planned(model, **parallel)
    assert sum(rank.parts["weights"] for rank in found.memory.ranks) == 2 * parameters(model).total


def test_in_8_bits_the_matrices_of_the_layers_have_half_of_that() -> None:
    wide, narrow = (planned(MIXED, linear=linear).memory.worst.parts["weights"] for linear in ("auto", "fp8-block"))
    matrices = sum(
        prod(shape)
        for number in range(MIXED.layers)
        for name, shape in layer_shapes(MIXED, number).items()
        if len(shape) > 1 and "router" not in name
    )
    assert wide - narrow == matrices


def test_zero_3_keeps_pieces_and_gathers_two_units() -> None:
    whole, cut = planned(), planned(zero=3)
    assert cut.memory.worst.parts["weights"] == pytest.approx(whole.memory.worst.parts["weights"] / 8)
    layer = 2 * sum(prod(shape) for shape in layer_shapes(DENSE, 0).values())
    assert cut.memory.worst.parts["gathered_weights"] == 2 * layer
    assert cut.time.parts["zero"] > 0
    assert planned(zero=1).memory == whole.memory


def test_keys_and_values_stay_for_all_tokens_of_a_share() -> None:
    one, many = planned(batch=8, dp=8), planned(batch=64, dp=8)
    assert one.memory.worst.parts["keys_and_values"] == 8 * 2 * 8 * 128 * 2 * 8192
    assert many.memory.worst.parts["keys_and_values"] == 8 * one.memory.worst.parts["keys_and_values"]
    assert many.memory.worst.parts["working"] == one.memory.worst.parts["working"]
    cut = planned(batch=8, tp=2, cp=2, dp=2)
    assert cut.memory.worst.parts["keys_and_values"] == one.memory.worst.parts["keys_and_values"]
    windowed = planned(DENSE.model_copy(update={"options": {"sliding_window": 1024, "sliding_every": 2}}), dp=8)
    assert windowed.memory.worst.parts["keys_and_values"] == 4 * 2 * 8 * 128 * 2 * (8192 + 1024)


def test_latent_attention_keeps_its_short_vectors_on_each_rank_of_tp_and_predicts_one_token() -> None:
    model = Model.model_validate(dict(preset_fields("deepseek-v3").value) | {"layers": 4})
    found = planned(model, gpus=16, seq_len=4096, tp=2, ep=16, zero=3)
    assert found.memory.worst.parts["keys_and_values"] == 4 * (512 + 64) * 2 * 4096
    assert found.parameters == parameters(model).total - parameters(model).mtp
    assert found.run.model.mtp == 0


def test_a_layer_is_gone_when_the_next_has_its_input() -> None:
    few, many = (planned(DENSE.model_copy(update={"layers": layers})) for layers in (4, 8))
    assert few.memory.worst.parts["working"] == many.memory.worst.parts["working"]
    longer = planned(seq_len=16384)
    assert longer.memory.worst.parts["working"] == pytest.approx(2 * many.memory.worst.parts["working"])


def test_hot_experts_and_other_software_count() -> None:
    run = run_of(MIXED, ep=8)
    even, hot, other = (
        forward(run, Execution(*each)) for each in (("fivefold",), ("fivefold", 2.0), ("megatron-2025",))
    )
    assert hot.time.seconds > even.time.seconds
    assert hot.memory.worst.parts["working"] > even.memory.worst.parts["working"]
    assert hot.flops == even.flops
    assert other.time.seconds != even.time.seconds
    with pytest.raises(UserError, match="the model has no experts"):
        forward(run_of(), Execution(hot_experts=2.0))


def test_the_rate_that_was_measured_of_attentions_forward_is_its_own(tmp_path: Path) -> None:
    def seconds(rates: str) -> float:
        file = tmp_path / "own.yaml"
        file.write_text(
            "name: own\nfamily: H100\npeak_tflops: {bf16: 989}\nmemory_gb: 80\nbandwidth_tb_s: 3.35\nlink_gb_s: 450\n"
            f"domain: 8\nnic_gbit_s: 400\nwatts: 700\nmeasured: {{attention_tflops: {rates}}}\n"
        )
        return planned(gpu=str(file), dp=8).time.parts["attention"]

    slow, fast = (seconds(f"{{forward: {rate}, backward: 200}}") for rate in (300, 600))
    assert slow == pytest.approx(2 * fast, rel=0.01)
    assert seconds("{forward: 600, backward: 400}") == fast


def test_rules_of_training_do_not_count_and_those_of_the_layout_do() -> None:
    run = run_of(batch=3, micro=2, pp=4, dp=2, schedule="interleaved", chunks=2)
    run = run.model_copy(update={"offload": ["heavy-activations", "parameters"], "tokens": 5.0})
    found = forward(run)
    assert (found.sequences, found.microbatches, found.run.batch.micro_size) == (2, 1, 2)
    assert found.notes == ("3 sequences on dp 2: the busiest shares have 2, others fewer or none",)
    assert forward(run_of(batch=1, micro=4, dp=8)).run.batch.micro_size == 1
    with pytest.raises(ConfigError, match=r"cannot be split over parallel\.tp"):
        planned(tp=3, gpus=3)
    with pytest.raises(ConfigError, match="context"):
        planned(seq_len=1_048_576)


def test_formats_that_this_version_does_not_multiply_in_are_noted() -> None:
    (note,) = planned(linear="fp8-block").notes
    assert note.startswith("precision.linear = fp8-block: this version does not run")
    assert planned().notes == ()


def test_the_rules_of_training_exist() -> None:
    assert {rule.name for rule in LEGALITY} >= OF_TRAINING
    assert len(FORWARD) == len(LEGALITY) - sum(rule.name in OF_TRAINING for rule in LEGALITY)


RUN = """\
name: prefill
steps: 1
model: {preset: llama-3-8b, vocab: 128256}
data: {train: [{path: none}], seq_len: 8192}
batch: {global_size: 8, micro_size: 1}
parallel: {tp: 2, pp: 2}
cluster: {gpu: h100, gpus: 4}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(commands, ["plan", "run.yaml", "--forward", *words], prog_name="fivefold")


def test_the_table_the_json_and_the_formulas_say_the_same(folder: Path) -> None:
    table, explained, found = call(), call("--explain"), json.loads(call("--json").stdout)
    assert (table.exit_code, table.stderr) == (0, "")
    assert table.stdout.startswith(
        "forward of prefill on 4 H100-SXM-80GB = pp 2 x dp 1 x cp 1 x tp 2, 8 microbatches of 1"
    )
    assert f"{found['figures']['pass_seconds']['value']:.3g} s" in table.stdout
    assert (found["mode"], found["fits"], found["software"]["name"]) == ("forward", True, "fivefold")
    assert sum(found["time"]["parts"].values()) == pytest.approx(found["figures"]["pass_seconds"]["value"])
    assert len(found["time"]["stages"]) == len(found["memory"]["ranks"]) == 2
    for rank in found["memory"]["ranks"]:
        assert sum(rank["bytes"].values()) == pytest.approx(rank["allocated"])
        assert f"{rank['allocated'] / 2**30:.2f}" in table.stdout
    for figure in forward(run_of()).figures:
        assert f"\n{figure.title} " in table.stdout
        assert f"  {figure.title} = " in explained.stdout or figure.name.startswith("memory_capacity")
        assert figure.text in figure.formula
    docs = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    for name in (*found, *found["figures"]):
        assert f"`{name}`" in docs, name


def test_what_does_not_fit_exits_with_3_and_says_what_it_is_and_what_makes_it_less(folder: Path) -> None:
    result = call("--batch.global_size", "4096", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["fits"] is False
    assert "does not fit: pipeline rank " in result.stderr
    assert "most of it are keys and values (" in result.stderr
    assert "fewer with more cp, tp or pp, or a smaller batch" in result.stderr
    assert "is the fullest" not in call("--batch.global_size", "4096").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks"], "give it without the other kinds"),
        (["--html", "a.html"], "give it without the other kinds"),
        (["--search"], "give it without the other kinds"),
        (["--gpu", "h10o"], "did you mean H100"),
        (["--gpus", "3"], "does not divide the 3 ranks"),
        (["--software", "megatron"], "there is no software called megatron"),
        (["--model.vocab", "auto"], "model.vocab is auto"),
    ],
)
def test_what_cannot_be_is_one_message_and_exit_code_2(folder: Path, words: list[str], message: str) -> None:
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in result.stderr
    assert not Path("a.html").exists()
