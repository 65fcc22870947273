"""The list of ranks: each stands where the mesh puts it, and every group is what its members say that it is."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fivefold._torch import pretended_rank
from fivefold.config.files import ConfigError
from fivefold.config.run import Experts, Precision, Source
from fivefold.errors import UserError
from fivefold.parallel.grid import AXES, Grid, Role
from fivefold.plan.planned import plan
from fivefold.plan.ranks import say_numbers
from tests.plan.runs import SMALL, llama_405b, small_run


def test_the_ranks_of_llama_405b_are_listed_in_a_blink() -> None:
    began = time.perf_counter()
    found = plan(llama_405b()).ranks().json()
    assert time.perf_counter() - began < 2
    assert (found["world"], len(found["ranks"])) == (16384, 16384)
    assert found["degrees"] == {"dp": 128, "pp": 16, "replicate": 1, "shard": 128, "cp": 1, "tp": 8}
    assert found["ranks"][12345] == {
        "rank": 12345,
        "node": 1543,
        "pp": 12,
        "replicate": 0,
        "shard": 7,
        "cp": 0,
        "tp": 1,
        "share": 7,
    }
    assert [stage["layers"] for stage in found["stages"]] == [7, *[8] * 14, 7]
    assert [stage["first_layer"] for stage in found["stages"]][:3] == [0, 7, 15]


def test_the_terminal_shows_the_first_and_the_last_ranks_and_says_how_many_it_leaves_out() -> None:
    lines = plan(llama_405b()).ranks().lines()
    assert lines[0] == "run llama-405b: 16,384 ranks = pp 16 x dp 128 x cp 1 x tp 8"
    assert lines[1] == "a step has 128 shares, each 16 microbatches of 1 sequence"
    numbers = [line.split()[0] for line in lines if line and line.split()[0].isdigit()]
    ranks = (*range(16), *range(16376, 16384))
    assert numbers == [str(n) for n in (*range(16), *range(16), *ranks)]  # stages, pipeline ranks, then all ranks
    assert "... 16,360 more ranks; --json has them all ..." in lines


def test_few_ranks_are_all_shown() -> None:
    lines = plan(small_run(dp=25, gpus=25, seq_len=64).model_copy(update={"batch": one_each(25)})).ranks().lines()
    assert not any("more ranks" in line for line in lines)
    assert lines[-1].split() == ["24", "0", "0", "24", "0", "0", "24"]


def one_each(dp: int):
    return small_run().batch.model_copy(update={"global_size": dp, "micro_size": 1})


def test_what_this_version_does_not_train_is_noted_and_not_refused() -> None:
    assert plan(small_run(tp=4, cp=2, dp=2)).notes == ()
    assert plan(small_run(pp=2, dp=1)).notes == ()
    assert plan(small_run(MIXTURE, ep=2, dp=2)).notes == ()
    wide = small_run(dp=1).model_copy(update={"precision": Precision(linear="fp4")})
    (note,) = plan(wide).notes
    assert note == (
        "precision.linear = fp4: this version does not run 8-bit and 4-bit linear layers; use precision.linear auto"
    )
    assert plan(wide).ranks().lines()[-1] == f"note: {note}"


def test_what_is_illegal_is_refused_with_all_rules_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(small_run(tp=5, pp=9, gpus=90))
    assert len(caught.value.problems) == 4
    assert "9 stages, but model.layers = 5" in str(caught.value)


def test_the_number_of_ranks_is_the_clusters_or_follows_from_dp() -> None:
    assert plan(small_run(tp=2, gpus=8)).run.parallel.dp == 4
    assert plan(small_run(tp=2, cp=2, dp=3)).grid.world == 12
    with pytest.raises(UserError, match=r"how many ranks there are is not known; give --gpus N .*or --parallel.dp N"):
        plan(small_run(tp=2))
    with pytest.raises(ConfigError, match=r"parallel\.dp = 0: it must be 1 or more"):
        plan(small_run(dp=0))


def test_stages_of_an_unknown_vocabulary_ask_for_it_and_a_single_stage_does_not() -> None:
    unknown = SMALL.model_copy(update={"vocab": "auto"})
    assert plan(small_run(unknown, dp=1)).ranks().stages == [range(5)]
    with pytest.raises(UserError, match=r"--model\.vocab N"):
        plan(small_run(unknown, pp=2, dp=1)).ranks()


def test_the_groups_of_rank_0_are_said_with_what_they_do() -> None:
    found = plan(small_run(pp=2, tp=2, cp=2, dp=4, replicate=2)).ranks()
    assert {group.axes: group.ranks for group in found.groups} == {
        "tp": [0, 1],
        "cp": [0, 2],
        "shard x cp": [0, 2, 4, 6],
        "replicate": [0, 8],
        "pp": [0, 16],
    }
    unsharded = plan(small_run(cp=2, dp=4, zero=0)).ranks()
    assert {group.axes: group.ranks for group in unsharded.groups} == {
        "cp": [0, 1],
        "replicate x shard x cp": list(range(8)),
    }
    assert "rank 0 works alone" in plan(small_run(dp=1)).ranks().lines()


def test_the_groups_are_those_of_the_mesh() -> None:
    from fivefold.parallel.mesh import mesh_of

    for parallel in ({"pp": 2, "tp": 2, "cp": 2, "dp": 4, "replicate": 2}, {"tp": 2, "cp": 2, "dp": 4, "zero": 0}):
        planned = plan(small_run(**parallel))
        groups = {group.axes: group.ranks for group in planned.ranks().groups}
        with pretended_rank(0, planned.grid.world):
            mesh = mesh_of(planned.run.parallel, torch.device("cpu"))
            assert dist.get_process_group_ranks(mesh.tp.group) == groups["tp"]
            assert dist.get_process_group_ranks(mesh.cp.group) == groups["cp"]
            data = {axis: dist.get_process_group_ranks(mesh.dense[axis].get_group()) for axis in ("shard", "replicate")}
        expected = (
            {"shard": groups["shard x cp"], "replicate": groups["replicate"]}
            if planned.run.parallel.zero
            else {
                "shard": [0],
                "replicate": groups["replicate x shard x cp"],
            }
        )
        assert data == expected


MIXTURE = SMALL.model_copy(update={"moe": Experts(experts=8, top_k=2, ffn=24, dense_layers=1, bias=True), "mtp": 1})


@pytest.mark.parametrize("zero", [0, 1])
def test_the_groups_of_experts_are_those_of_the_mesh(zero: int) -> None:
    """ep is innermost and cuts across dp, cp and tp: the replicas of an expert are all other ranks of its stage."""
    from fivefold.parallel.mesh import mesh_of

    planned = plan(small_run(MIXTURE, pp=2, tp=2, cp=2, dp=2, ep=4, zero=zero))
    groups = {group.axes: group for group in planned.ranks().groups}
    with pretended_rank(0, 16):
        experts = mesh_of(planned.run.parallel, torch.device("cpu")).experts
        found = {axis: dist.get_process_group_ranks(experts[axis].get_group()) for axis in ("ep", "replicate", "shard")}
    replicas = groups["expert replica"]
    assert found["ep"] == groups["ep"].ranks == [0, 1, 2, 3]
    assert found["shard" if zero else "replicate"] == replicas.ranks == [0, 4]
    assert ("sum their gradients" in replicas.does) == (zero == 0)


def test_ranks_of_a_mixture_say_which_experts_they_have_and_what_the_last_stage_predicts() -> None:
    found = plan(small_run(MIXTURE, pp=2, tp=2, dp=4, ep=4)).ranks()
    lines = found.lines()
    assert lines[2] == "experts over ep 4, so 2 replicas of each"
    assert lines[-1].split() == ["15", "1", "0", "3", "0", "1", "3", "3"]
    assert sum(line.endswith("last norm, head, 1 further prediction") for line in lines) == 1
    assert found.json()["degrees"]["ep"] == 4
    assert [row["ep"] for row in found.json()["ranks"]] == [0, 1, 2, 3] * 4
    dense = plan(small_run(dp=2)).ranks()
    assert not any("expert" in line for line in dense.lines())
    assert "ep" not in dense.json()["ranks"][0]


GRID = Grid(pp=2, replicate=2, shard=3, cp=2, tp=4)


def test_roles_number_every_rank_once_with_tp_innermost() -> None:
    roles = [GRID.role(rank) for rank in range(GRID.world)]
    assert len(set(roles)) == GRID.world == 96
    assert [GRID.rank(role) for role in roles] == list(range(96))
    assert roles == sorted(roles)
    assert roles[1] == Role(0, 0, 0, 0, 1)
    assert roles[4] == Role(0, 0, 0, 1, 0)
    assert Counter(GRID.dp_rank(rank) for rank in range(96)) == dict.fromkeys(range(6), 16)


@pytest.mark.parametrize("axes", [(axis,) for axis in AXES] + [("shard", "cp"), ("replicate", "shard", "cp"), AXES])
def test_peers_divide_the_ranks_into_groups_of_the_axes_product(axes: tuple[str, ...]) -> None:
    groups = {tuple(GRID.peers(rank, *axes)) for rank in range(GRID.world)}
    assert sorted(rank for group in groups for rank in group) == list(range(GRID.world))
    for group in groups:
        others = [[getattr(GRID.role(rank), axis) for axis in AXES if axis not in axes] for rank in group]
        assert all(place == others[0] for place in others)
        assert list(group) == sorted(group)


def test_numbers_are_said_in_few_words() -> None:
    assert say_numbers([3]) == "3"
    assert say_numbers([0, 1]) == "0, 1"
    assert say_numbers([0, 1, 2, 3]) == "0 to 3"
    assert say_numbers([0, 8, 16, 24]) == "0, 8, 16, 24"
    assert say_numbers(list(range(0, 80, 8))) == "0, 8, 16, ..., 72"


def test_a_plan_of_ranks_loads_no_torch() -> None:
    code = (
        "import sys; from fivefold import Run, plan\n"
        "from tests.plan.runs import llama_405b\n"
        "assert len(plan(llama_405b()).ranks().json()['ranks']) == 16384; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_vocabulary_that_the_data_tells_and_that_tp_cannot_cut_is_refused(tmp_path: Path) -> None:
    """Nine rows over four ranks are 3, 3, 3 and none."""
    (tmp_path / "dataset.json").write_text('{"vocab": 9}')
    run = small_run(SMALL.model_copy(update={"vocab": "auto"}), tp=4, gpus=4)
    run = run.model_copy(update={"data": run.data.model_copy(update={"train": [Source(path=tmp_path)]})})
    with pytest.raises(ConfigError, match=r"model\.vocab = 9 has no row for each of parallel\.tp = 4 ranks"):
        plan(run)
