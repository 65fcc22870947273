"""A rank that is built without the others: its shards are those of torch.chunk's rule, and over all ranks they are the
whole model.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.config.run import Experts, LatentAttention, Model, Run
from fivefold.errors import UserError
from fivefold.model.spec import parameter_shapes, parameters
from fivefold.parallel.grid import Grid
from fivefold.pipeline.stages import stage_layers
from fivefold.plan.dry_run import RankBuild
from fivefold.plan.planned import Plan, plan
from tests.plan.runs import SMALL, llama_405b, small_run

Shape = tuple[int, ...]

ROWS = ("qkv.weight", "qkv.bias", "up.weight", "up.bias", "embedding.weight", "head.weight")  # gate_up too
ROWS += ("q_b.weight", "kv_b.weight")
COLUMNS = ("output.weight", "down.weight")
EXPERTS = {"ffn.experts.gate_up": 1, "ffn.experts.down": 2}
"""The parameters of experts, and their dimension that is an expert's width."""


def chunk(size: int, parts: int, number: int) -> int:
    """Rows of the piece `number` that torch.chunk cuts, 0 where it has cut fewer pieces."""
    length = math.ceil(size / parts)
    return max(0, min(size, (number + 1) * length) - number * length)


def tp_dimension(name: str) -> int | None:
    """The dimension of a parameter that tp cuts."""
    return 0 if name.endswith(ROWS) else 1 if name.endswith(COLUMNS) else None


def shard_shape(name: str, shape: Shape, grid: Grid, tp: int, shard: int) -> Shape:
    """What rank `tp` of tp and rank `shard` of the shards has of a parameter."""
    sizes, dimension = list(shape), tp_dimension(name)
    if dimension is not None:
        sizes[dimension] = chunk(sizes[dimension], grid.tp, tp)
    sizes[0] = chunk(sizes[0], grid.shard * grid.cp, shard)
    return tuple(sizes)


def width_of_expert(name: str) -> int | None:
    """The dimension of an expert's width, of a parameter of experts."""
    return next((dimension for end, dimension in EXPERTS.items() if name.endswith(end)), None)


def expert_shape(shape: Shape, dimension: int, grid: Grid, ep: int, rank: int) -> Shape:
    """What a rank has of a parameter of experts: some of ep's share if its replicas divide it, or a part of each."""
    replicas = grid.world // grid.pp // ep
    experts, *sizes = shape
    mine = experts // ep
    if mine % replicas == 0:
        return (mine // replicas, *sizes)
    sizes[dimension - 1] //= replicas
    return (mine, *sizes)


def names_of_stage(model: Model, layers: range, first: bool, last: bool) -> list[str]:
    """The parameters of a stage: its layers', and with them what stands before the first or behind the last."""
    before, behind = ("embedding.weight", "embedding_norm."), ("norm.", "head.", "mtp.")
    return [
        name
        for name in parameter_shapes(model)
        if (name.startswith("layers.") and int(name.split(".")[1]) in layers)
        or (first and name.startswith(before))
        or (last and name.startswith(behind))
    ]


def shapes_of_stages(run: Run, stages: list[int]) -> dict[str, Shape]:
    every = parameter_shapes(run.model)
    layers = stage_layers(run)
    return {
        name: every[name]
        for stage in stages
        for name in names_of_stage(run.model, layers[stage], first=stage == 0, last=stage == len(layers) - 1)
    }


def stages_of(planned: Plan, pp: int) -> list[int]:
    """The stages of a pipeline rank."""
    return [0] if planned.schedule is None else planned.schedule.stages_of(pp)


def expected_shapes(planned: Plan, rank: int) -> dict[str, Shape]:
    """By the arithmetic above: the shapes of all shards of a rank, with ZeRO 1 or more."""
    grid, role = planned.grid, planned.grid.role(rank)
    shard, ep = role.shard * grid.cp + role.cp, planned.run.parallel.ep
    return {
        name: expert_shape(shape, width, grid, ep, rank)
        if (width := width_of_expert(name))
        else shard_shape(name, shape, grid, role.tp, shard)
        for name, shape in shapes_of_stages(planned.run, stages_of(planned, role.pp)).items()
    }


def built_shapes(built: RankBuild) -> dict[str, Shape]:
    return {parameter.name: parameter.local_shape for parameter in built.parameters if parameter.copy_of is None}


@pytest.fixture(scope="module")
def big() -> Plan:
    return plan(llama_405b())


@pytest.mark.parametrize("rank", [0, 12345, 16383])
def test_the_shards_of_a_rank_of_llama_405b_are_those_of_the_arithmetic(big: Plan, rank: int) -> None:
    built = big.build_rank(rank)
    assert built_shapes(built) == expected_shapes(big, rank)
    assert {parameter.name: parameter.shape for parameter in built.parameters} == shapes_of_stages(
        big.run, [big.grid.role(rank).pp]
    )
    assert built.counts["model"] == 405_853_388_800


def test_over_all_stages_tp_ranks_and_shards_the_parameters_of_llama_405b_sum_to_the_models(big: Plan) -> None:
    """Each distinct (pp, tp) coordinate with its 128 shards; what tp does not cut is counted once."""
    grid, total = big.grid, 0
    for stage in range(grid.pp):
        for name, shape in shapes_of_stages(big.run, [stage]).items():
            coordinates = range(grid.tp) if tp_dimension(name) is not None else [0]
            total += sum(
                math.prod(shard_shape(name, shape, grid, tp, shard))
                for tp, shard in product(coordinates, range(grid.shard))
            )
    assert total == parameters(big.run.model).total == 405_853_388_800


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"pp": 2, "tp": 2, "dp": 2}),
    ("llama", {"tp": 4, "dp": 3, "zero": 3}),
    ("llama", {"cp": 2, "dp": 4, "replicate": 2}),
    ("llama", {"tp": 2, "cp": 2, "zero": 0, "dp": 1}),
    ("tied", {"pp": 2, "tp": 4, "dp": 1}),
    ("bloom", {"pp": 3, "tp": 2, "dp": 1}),
    ("qwen3", {"tp": 2, "dp": 4, "replicate": 2}),
    ("deep", {"pp": 2, "chunks": 2, "schedule": "zb-v", "dp": 2}),
    ("deep", {"pp": 2, "chunks": 2, "schedule": "interleaved", "tp": 2, "dp": 1}),
    ("deep", {"chunks": 3, "schedule": "interleaved", "dp": 2, "zero": 3}),
    ("mixture", {"pp": 2, "tp": 2, "dp": 2, "ep": 2}),
    ("mixture", {"dp": 3, "zero": 3}),
    ("mixture", {"cp": 2, "dp": 2, "ep": 2, "zero": 0}),
]
LLAMA = SMALL.model_copy(update={"layers": 3})
MODELS = {
    "llama": LLAMA,
    "deep": SMALL.model_copy(update={"tied": True}),
    "tied": LLAMA.model_copy(update={"tied": True}),
    "mixture": LLAMA.model_copy(
        update={
            "layers": 2,
            "moe": Experts(experts=8, top_k=2, ffn=24, shared=1, dense_layers=1, bias=True),
            "mla": LatentAttention(q_rank=16, kv_rank=18, plain=8, rotated=4, value=8),
            "mtp": 1,
        }
    ),
    "qwen3": LLAMA.model_copy(update={"qk_norm": True}),
    "bloom": LLAMA.model_copy(
        update={"family": "bloom", "norm": "layernorm", "activation": "gelu", "bias": True, "position": "alibi"}
        | {"embedding_norm": True, "tied": True, "kv_heads": 12}
    ),
}


def every_rank(planned: Plan) -> Iterator[RankBuild]:
    return (planned.build_rank(rank) for rank in range(planned.grid.world))


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_all_ranks_together_hold_the_model_each_copy_counted_once(model: str, layout: dict[str, Any]) -> None:
    planned = plan(small_run(MODELS[model], **layout))
    grid, zero = planned.grid, planned.run.parallel.zero
    held: dict[str, float] = {}
    for built in every_rank(planned):
        if zero:
            assert built_shapes(built) == expected_shapes(planned, built.rank)
        assert built.counts["model"] == parameters(planned.run.model).total
        for parameter in (each for each in built.parameters if each.copy_of is None):
            held[parameter.name] = held.get(parameter.name, 0) + parameter.local_elements / parameter.copies
            copies = grid.dp * grid.cp if zero == 0 else grid.replicate
            copies *= 1 if tp_dimension(parameter.name) is not None else grid.tp
            if width_of_expert(parameter.name):
                copies = grid.world // grid.pp // planned.run.parallel.ep if zero == 0 else 1
            assert parameter.copies == copies
    whole = {name: math.prod(shape) for name, shape in parameter_shapes(planned.run.model).items()}
    assert held == pytest.approx(whole, rel=1e-12)


def test_the_bytes_of_a_rank_are_those_of_its_shards_in_their_formats() -> None:
    built = plan(small_run(tp=2, dp=2)).build_rank(3)
    here, gathered = built.counts["rank"], built.bytes["gathered_weights"] // 2
    scalars = 4 * len(built.parameters)  # AdamW's count of steps
    assert built.bytes == {
        "weights": 4 * here,
        "gradients": 4 * here,
        "moments": 8 * here + scalars,
        "gathered_weights": 2 * gathered,
        "unreduced_gradients": 4 * gathered,
    }
    cut = [p for p in built.parameters if tp_dimension(p.name) is not None]
    assert gathered == pytest.approx(built.counts["stages"] - sum(p.elements for p in cut) / 2, abs=48)


def test_formats_of_the_run_file_are_those_of_the_bytes() -> None:
    run = small_run(dp=1)
    exact = run.model_copy(update={"precision": run.precision.model_copy(update={"compute": "fp64"})})
    built = plan(exact).build_rank(0)
    total = built.counts["model"]
    assert {parameter.dtype for parameter in built.parameters} == {"fp64"}
    assert built.bytes["weights"] == built.bytes["gathered_weights"] == built.bytes["unreduced_gradients"] == 8 * total
    narrow = run.model_copy(update={"precision": run.precision.model_copy(update={"master": "bf16"})})
    small = plan(narrow).build_rank(0)
    assert small.bytes["weights"] == small.bytes["gradients"] == 2 * total
    assert small.bytes["moments"] == pytest.approx(4 * total, rel=1e-3)


def test_a_rank_of_a_model_that_no_machine_holds_is_built() -> None:
    """Eight layers of Llama 3 405B on a single rank: 111 GiB of weights in fp32, and twice as much for the moments."""
    run = llama_405b(tp=1, pp=1, dp=1)
    built = plan(run.model_copy(update={"model": run.model.model_copy(update={"layers": 8})})).build_rank(0)
    total = 2 * 128256 * 16384 + 16384 + 8 * (2 * 16384 + 16384 * (144 * 128 + 16384 + 3 * 53248))
    assert built.counts == dict.fromkeys(("model", "stages", "rank"), total)
    assert built.bytes["weights"] == 4 * total


def test_building_ranks_leaves_no_process_group_and_nothing_of_the_last_one() -> None:
    planned = plan(small_run(pp=2, tp=2, dp=2))
    first, second, again = (planned.build_rank(rank) for rank in (0, 7, 0))
    assert first == again
    assert first.stages != second.stages
    assert not dist.is_initialized()
    assert type(torch.ones(1) + 1) is torch.Tensor


def test_rank_12345_of_llama_405b_takes_less_than_20_seconds_and_4_gib(tmp_path: Path) -> None:
    """Seconds of the processor, as the machine may have other work."""
    (tmp_path / "run.yaml").write_text(
        "name: big\nsteps: 1\nmodel: {preset: llama-3-405b}\ndata: {train: [{path: x}], seq_len: 8192}\n"
        "batch: {global_size: 2048}\nparallel: {tp: 8, pp: 16, dp: 128}\n"
    )
    command = ["plan", "run.yaml", "--build-rank", "12345", "--json"]
    code = (
        "import resource, sys; from fivefold.cli import commands; commands.main(sys.argv[1:], standalone_mode=False)\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20, file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    seconds, gib = map(float, ran.stderr.split())
    assert seconds < 20
    assert gib < 4
    assert json.loads(ran.stdout)["counts"] == {"model": 405_853_388_800, "stages": 25_501_630_464, "rank": 24_905_728}


def test_a_rank_that_does_not_exist_is_refused_before_torch_is_loaded() -> None:
    code = (
        "import sys; from fivefold.errors import UserError; from fivefold import plan\n"
        "from tests.plan.runs import llama_405b\n"
        "try: plan(llama_405b()).build_rank(16384)\n"
        "except UserError as error: assert 'there is no rank 16384' in str(error) and '0 to 16383' in str(error)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_cannot_be_built_is_refused_with_a_reason() -> None:
    unknown = SMALL.model_copy(update={"vocab": "auto"})
    with pytest.raises(UserError, match=r"model\.vocab is auto"):
        plan(small_run(unknown, dp=1)).build_rank(0)
    assert not dist.is_initialized()


def test_the_copy_of_a_tied_embedding_is_held_by_the_last_stage_and_is_no_parameter() -> None:
    planned = plan(small_run(MODELS["tied"], pp=2, tp=2, dp=4, replicate=2))
    first, last = planned.build_rank(0), planned.build_rank(8)  # of the same shard
    assert not any(parameter.copy_of for parameter in first.parameters)
    owner, copy = first.parameters[0], last.parameters[-1]
    assert (owner.name, copy.name, copy.copy_of, copy.moments) == (
        *("embedding.weight", "head.weight", "embedding.weight"),
        {},
    )
    same = ("shape", "local_shape", "copies", "dtype", "weight", "gradient", "gathered_weight", "unreduced_gradient")
    assert [getattr(copy, name) for name in same] == [getattr(owner, name) for name in same]
    own = sum(parameter.weight for parameter in last.parameters[:-1])
    assert last.bytes["weights"] == own + copy.weight
    assert last.counts["rank"] == own // 4
    assert any(line.startswith("head.weight (copy of embedding.weight)  1003 x 48") for line in last.lines())


def test_a_rank_with_several_stages_says_which_layers_each_has() -> None:
    planned = plan(small_run(MODELS["deep"], pp=2, chunks=2, schedule="zb-v", dp=1))
    built = planned.build_rank(0)
    assert built.stages == {0: range(1), 3: range(4, 5)}
    assert built.lines()[1] == (
        "rank 0 stands at pp 0, replicate 0, shard 0, cp 0, tp 0, and has stages 0, 3 (layers 0; 4)"
    )
    assert (built.json()["stages"], built.json()["layers"]) == ([0, 3], [0, 4])
    assert " in these stages, " in "\n".join(built.lines())
    assert "\n".join(built.lines()).count("through the step") == 2
    assert planned.build_rank(1).stages == {1: range(1, 2), 2: range(2, 4)}


def test_the_terminal_shows_role_layers_parameters_and_sizes() -> None:
    lines = plan(llama_405b()).build_rank(12345).lines()
    assert lines[1] == "rank 12345 stands at pp 12, replicate 0, shard 7, cp 0, tp 1, and has layers 95 to 102"
    assert "layers.95.attention.qkv.weight      18432 x 16384   18 x 16384   fp32    1" in lines
    assert "parameters: 405,853,388,800 in the model, 25,501,630,464 in this stage, 24,905,728 here" in lines
    sizes = {line.split("  ")[0]: line for line in lines if "iB" in line}
    assert "95 MiB" in sizes["weights"]
    assert "190 MiB" in sizes["moments"]


def test_sizes_say_what_lies_in_cpu_memory_and_how_long_gathered_things_live() -> None:
    def sizes(offload: list[str]) -> dict[str, str]:
        lines = plan(small_run(dp=2, zero=3).model_copy(update={"offload": offload})).build_rank(0).lines()
        return {line.split("  ")[0]: line.rsplit("  ")[-1].strip() for line in lines if "iB" in line}

    one_by_one = dict.fromkeys(
        ("gathered weights", "unreduced gradients"), "one unit (layer, embedding or head) at a time"
    )
    here = "in CPU memory"
    assert one_by_one.items() <= sizes([]).items()
    assert here not in sizes(["activations"]).values()
    everything = {"weights": here, "gradients": here, "moments": here}
    assert sizes(["optimizer", "parameters", "activations"]) == everything | one_by_one
    assert sizes(["optimizer"]).items() >= {"weights": "and a copy in CPU memory", "moments": here}.items()
    kept = "\n".join(plan(small_run(dp=2, zero=1)).build_rank(0).lines())
    assert kept.count("through the step") == 2
    whole_batch = small_run(dp=2).batch.model_copy(update={"micro_size": 24})
    once = "\n".join(plan(small_run(dp=2).model_copy(update={"batch": whole_batch})).build_rank(0).lines())
    assert once.count("through the step") == 1
    assert "in CPU memory" not in kept
