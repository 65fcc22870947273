"""Hot experts: the busiest rank of ep has so many times the rows, the work, the exchange and the memory of the mean."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fivefold.cli import commands
from fivefold.config.run import Cluster, Experts, Model, Run
from fivefold.errors import UserError
from fivefold.plan.cluster import cluster_of
from fivefold.plan.constants import constants
from fivefold.plan.execution import OURS, Execution, check_hot_experts
from fivefold.plan.hot_experts import rank_load, read_hot_experts
from fivefold.plan.memory.own_layers import OwnLayers
from fivefold.plan.memory.peak import memory
from fivefold.plan.software import STACKS
from fivefold.plan.time.layers import LayerTimes
from fivefold.plan.time.rates import Rates
from fivefold.plan.time.step import StepTime, step_time
from fivefold.plan.time.work import Sizes, Work, layer_work
from tests.plan.runs import small_run

MODEL = Model(
    layers=4, hidden=2048, heads=16, kv_heads=4, ffn=4096, vocab=32000,
    moe=Experts(experts=32, top_k=2, ffn=1408, shared=1, dense_layers=1),
)  # fmt: skip
FACTORS = (1.0, 1.1, 1.3, 2.0, 4.0)


def mixed(**parallel: Any) -> Run:
    run = small_run(MODEL, seq_len=4096, **({"dp": 8, "ep": 8} | parallel))
    return run.model_copy(update={"cluster": Cluster(gpu="h100", gpus=8)})


def step(run: Run, execution: Execution) -> StepTime:
    return step_time(run, cluster_of(run), execution.software(run.parallel))


def hot_work(run: Run, hot: float) -> Work:
    return layer_work(Sizes.of(run, Execution(hot_experts=hot).software(run.parallel)), 2)


@pytest.mark.parametrize("stack", ["fivefold", "megatron-2026", "torchtitan-2024"])
def test_a_factor_of_1_changes_nothing_and_more_makes_it_longer_and_fuller(stack: str) -> None:
    run = mixed()
    times, bytes = [], []
    for factor in FACTORS:
        execution = Execution(stack, factor)
        software = execution.software(run.parallel)
        times.append(step(run, execution).seconds)
        bytes.append(memory(run, cluster_of(run), software).worst.allocated)
    assert times == sorted(set(times))
    assert bytes == sorted(set(bytes))
    assert times[0] == step_time(run, cluster_of(run), Execution(stack).software(run.parallel)).seconds
    assert Execution(stack, 1.0).software(run.parallel) == Execution(stack).software(run.parallel)


def test_the_grouped_products_of_that_rank_have_so_many_times_the_rows_and_take_as_many_times_as_long() -> None:
    run = mixed().model_copy(update={"batch": mixed().batch.model_copy(update={"micro_size": 6})})
    rates = Rates(run, cluster_of(run).accelerator, OURS.software(run.parallel), constants())
    launch = rates.generation.launch
    for plain, hot in zip(hot_work(run, 1.0).operations, hot_work(run, 2.0).operations, strict=True):
        if plain.name in ("experts.up", "experts.down"):
            assert plain.shape is not None
            assert hot.shape == plain.shape._replace(m=2 * plain.shape.m)
            assert rates.forward(hot) - launch == pytest.approx(2 * (rates.forward(plain) - launch), rel=0.03)
            assert hot.saved == 2 * plain.saved
        elif plain.name in ("dispatch", "combine", "experts.activation"):
            assert plain.bytes < hot.bytes <= 2 * plain.bytes
        else:
            assert hot == plain, "what is no expert's does not depend on their loads"


def test_its_exchange_is_so_many_times_as_large_and_what_the_model_computes_is_the_same() -> None:
    run = mixed()
    plain, hot = hot_work(run, 1.0), hot_work(run, 1.5)
    assert [each.bytes for each in hot.communications if each.axis == "ep"] == [
        1.5 * each.bytes for each in plain.communications if each.axis == "ep"
    ]
    assert hot.flops == pytest.approx(plain.flops)
    even, uneven = step(run, OURS), step(run, Execution(hot_experts=1.5))
    assert uneven.mfu / even.mfu == pytest.approx(even.seconds / uneven.seconds)
    assert uneven.parts["ep"] > 1.4 * even.parts["ep"]
    assert uneven.parts["attention"] == even.parts["attention"]


def test_what_waits_for_its_backward_grows_by_the_rows_that_arrive() -> None:
    """Without recompute a rank keeps of each token that comes its row, in 16 bits, and the places of its choices, and
    of each of its choices both gates, the gate's number and three indices. A token's two choices reach 1.90 ranks."""
    run, hot = mixed(), 1.5
    software = OURS.software(run.parallel)
    even, uneven = (memory(run, cluster_of(run), each).worst for each in (software, replace(software, hot_experts=hot)))
    assert MODEL.moe is not None
    tokens = run.batch.micro_size * run.data.seq_len
    a_token, a_choice = 2 * MODEL.hidden + 2 * 8, 2 * 2 * MODEL.moe.ffn + 4 + 3 * 8
    more_tokens = 8 * (1 - 28 / 32 * 27 / 31) * ((1 - (1 - hot / 8) ** 2) / (1 - (1 - 1 / 8) ** 2) - 1)
    more_choices = (hot - 1) * 2
    more = 3 * tokens * (more_tokens * a_token + more_choices * a_choice)
    assert uneven.microbatch - even.microbatch == pytest.approx(more)


def test_the_gradients_of_the_rows_that_arrive_grow_while_the_layer_is_in_its_backward() -> None:
    run = mixed()
    assert MODEL.moe is not None
    rows = 0.5 * run.batch.micro_size * run.data.seq_len * MODEL.moe.top_k
    more = OwnLayers(run, 1.5).working(2) - OwnLayers(run).working(2)
    assert more == pytest.approx(2 * rows * (2 * MODEL.hidden + 4 * MODEL.moe.ffn))


def test_recompute_and_deferred_weight_gradients_of_hot_experts_grow_too() -> None:
    for parallel in ({"pp": 2, "dp": 4, "ep": 4, "schedule": "zb-h1"}, {}):
        run = mixed(**parallel)
        for stack in STACKS:
            even, uneven = (Execution(stack, factor).software(run.parallel) for factor in (1.0, 1.5))
            assert (
                memory(run, cluster_of(run), uneven).worst.allocated
                > memory(run, cluster_of(run), even).worst.allocated
            ), stack


def test_on_few_ranks_no_load_is_above_their_number() -> None:
    execution = Execution(hot_experts=4.0)
    assert execution.software_of(1, 1, 2).hot_experts == 2
    assert execution.software_of(1, 1, 1) == OURS.software_of(1, 1, 1)


@pytest.mark.parametrize(
    ("model", "ep", "hot", "words"),
    [
        (MODEL, 8, 0.9, "from 1 to 8"),
        (MODEL, 8, 8.5, "from 1 to 8"),
        (MODEL, 32, 17, "from 1 to 16; the most is there if each token sends it as many of its 2 choices"),
        (MODEL, 1, 1.5, "with parallel.ep = 1 every rank has all experts"),
        (MODEL.model_copy(update={"moe": None}), 1, 1.5, "the model has no experts"),
    ],
)
def test_a_load_that_cannot_be_is_refused_with_the_numbers(model: Model, ep: int, hot: float, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_hot_experts(model, ep, hot)


def test_the_load_of_a_rank_is_that_of_its_experts_together() -> None:
    assert rank_load([4, 0, 1, 1, 1, 1, 0, 0], 4) == 2.0
    assert rank_load([4, 0, 1, 1, 1, 1, 0, 0], 2) == 1.5
    assert rank_load([4, 0, 1, 1, 1, 1, 0, 0], 8) == 4.0
    assert rank_load([7, 9], 1) == 1.0
    assert rank_load([4, 0, 1, 1, 1, 1, 0, 0], 4, 1.5) == 1.0  # ranks keep 1.5, 2, 2 and 0, of 2 each
    assert rank_load([4, 3, 0, 0, 1, 0, 0, 0], 4, 1.25) == 1.25
    assert rank_load([4, 0, 1, 1, 1, 1, 0, 0], 8, 1.5) == 1.5


def counted(folder: Path, *steps: dict[str, list[int]]) -> Path:
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": number, "counts": counts}) + "\n" for number, counts in enumerate(steps)]
    (folder / "experts.jsonl").write_text("".join(lines))
    return folder


def test_a_finished_run_tells_its_load_by_the_later_half_of_its_steps(tmp_path: Path) -> None:
    even, uneven, worse = [4] * 32, [12, *[4] * 29, 0, 0], [20, *[4] * 28, 0, 0, 0]
    folder = counted(tmp_path / "runs" / "mine", {"1": worse}, {"1": worse}, {"1": even, "2": uneven}, {"1": uneven})
    run = mixed()
    loads = (1.0, 24 / 16, 24 / 16)
    assert read_hot_experts(str(folder), run) == pytest.approx(sum(loads) / 3)
    assert read_hot_experts("1.25", run) == 1.25


@pytest.mark.parametrize(
    "line",
    [
        {"step": 1},
        {"counts": 5},
        {"counts": []},
        {"counts": {"layers.0": "x"}},
        {"counts": {"layers.0": 7, "layers.1": None, "layers.2": {}}},
        {"counts": {"layers.0": [1, "x"], "layers.1": [[]], "layers.2": []}},
        {"counts": {"layers.0": [-4, *[4] * 31], "layers.1": [True] * 32, "layers.2": [float("nan")] * 32}},
        {"counts": {"layers.0": [10**400, *[4] * 31], "layers.1": [1e300] * 32, "layers.2": [0] * 32}},
        {"counts": {"layers.0": [3, 5]}},
    ],
)
def test_damaged_lines_of_a_finished_run_are_left_out(tmp_path: Path, line: dict[str, Any]) -> None:
    folder = counted(tmp_path / "run", *[{"1": [12, *[4] * 29, 0, 0]}] * 2)
    with (folder / "experts.jsonl").open("a") as file:
        file.write(f"[\n{json.dumps(line)}\n")
    assert read_hot_experts(str(folder), mixed()) == 24 / 16
    (folder / "experts.jsonl").write_text(json.dumps(line))
    with pytest.raises(UserError, match=r"has no counts|counts the choices of 2 experts"):
        read_hot_experts(str(folder), mixed())


def test_counts_that_cannot_be_read_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "run" / "experts.jsonl").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot read"):
        read_hot_experts(str(tmp_path / "run"), mixed())


def test_experts_that_do_not_divide_over_ep_have_no_load(tmp_path: Path) -> None:
    folder = counted(tmp_path / "run", {"1": [4] * 32})
    for ep in (5, 64):
        run = mixed().model_copy(update={"parallel": mixed().parallel.model_copy(update={"ep": ep})})
        with pytest.raises(UserError, match=f"32 experts cannot be shared out over parallel.ep = {ep}"):
            read_hot_experts(str(folder), run)


def test_a_run_tells_no_load_of_ranks_that_have_all_experts(tmp_path: Path) -> None:
    folder = counted(tmp_path / "run", {"1": [12, *[4] * 29, 0, 0]})
    with pytest.raises(UserError, match=r"give parallel\.ep, for which the load of a rank is counted, or a number"):
        read_hot_experts(str(folder), mixed(ep=1))


@pytest.mark.parametrize(
    ("steps", "words"),
    [([], "has no counts"), ([{"1": [3, 5]}], "counts the choices of 2 experts, and the model has 32")],
)
def test_a_run_that_says_nothing_of_these_experts_is_refused(tmp_path: Path, steps: list[Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_hot_experts(str(counted(tmp_path / "run", *steps)), mixed())


RUN = """\
name: mixed
steps: 100
model: {preset: qwen3-30b-a3b}
data: {train: [{path: none}], seq_len: 4096}
batch: {global_size: 64, micro_size: 1}
parallel: {ep: 8}
cluster: {gpu: h100, gpus: 8}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(commands, ["plan", "run.yaml", *words], prog_name="fivefold")


def test_the_command_takes_the_factor_and_says_so_among_the_assumptions(folder: Path) -> None:
    even, uneven = (json.loads(call("--json", *words).stdout) for words in ((), ("--hot-experts", "1.3")))
    assert (even["hot_experts"], uneven["hot_experts"]) == (1.0, 1.3)
    assert uneven["figures"]["step_seconds"]["value"] > 1.05 * even["figures"]["step_seconds"]["value"]
    assert uneven["memory"]["ranks"][0]["allocated"] > even["memory"]["ranks"][0]["allocated"]
    table = call("--hot-experts", "1.3").stdout.splitlines()
    assert "hot experts: in each layer the busiest rank of ep gets 1.3 x the mean of the rows" in table
    assert any(line.startswith("assumption: experts get equal loads") for line in call().stdout.splitlines())
    assert not any("equal loads" in line for line in table)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hot-experts", "much"], "--hot-experts much is no run (much and runs/much are no folders) and no number"),
        (["--hot-experts", "nan"], "is no run"),
        (["--hot-experts", "0.5"], "from 1 to 8"),
        (["--hot-experts", "1.5", "--parallel.ep", "1"], "with parallel.ep = 1"),
        (["--hot-experts", "40", "--search"], "from 1 to 16"),
        (["--hot-experts", "1.5", "--ranks"], "give them without --ranks"),
    ],
)
def test_a_wrong_factor_is_one_message_and_exit_code_2(folder: Path, words: list[str], message: str) -> None:
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in result.stderr


def test_layers_know_which_rank_they_time() -> None:
    run = mixed()
    software = Execution(hot_experts=2.0).software(run.parallel)
    layers = LayerTimes(run, cluster_of(run), software, constants())
    dense, moe = (layers.of(layer_work(layers.sizes, number)) for number in (0, 2))
    plain = LayerTimes(run, cluster_of(run), OURS.software(run.parallel), constants())
    assert dense.total == plain.of(layer_work(plain.sizes, 0)).total
    assert moe.total > plain.of(layer_work(plain.sizes, 2)).total
