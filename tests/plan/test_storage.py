"""Storage: checkpoints and token files of the sizes that are known, and the rates that follow from the tiers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from fivefold.config.run import Checkpoint, Precision, Run
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name
from fivefold.parallel.grid import Grid
from fivefold.plan.cluster import Cluster, cluster
from fivefold.plan.goodput.formulas import THREE_TIERS, Tier
from fivefold.plan.storage import (
    checkpoint_size,
    nodes_that_read_a_token,
    storage_of,
    tier_need,
    tier_of,
    token_files,
)
from tests.plan.runs import llama_405b

LLAMA = 405_853_388_800


@pytest.fixture(scope="module")
def run() -> Run:
    checkpoint = Checkpoint(keep=3)
    return llama_405b().model_copy(update={"steps": None, "tokens": 15.6e12, "checkpoint": checkpoint})


@pytest.fixture(scope="module")
def h100s() -> Cluster:
    return cluster(by_name("h100"), 16_384)


def test_a_checkpoint_of_405b_has_4_9_tb_5_7_with_bf16_weights_and_the_quoted_6_5_with_gradients() -> None:
    assert checkpoint_size(LLAMA).bytes == pytest.approx(4.87e12, rel=0.001)
    assert checkpoint_size(LLAMA, weights=2).bytes == pytest.approx(5.68e12, rel=0.001)
    assert checkpoint_size(LLAMA, weights=2, moments=10).bytes == pytest.approx(6.49e12, rel=0.001)


def test_forty_trillion_tokens_of_a_large_vocabulary_have_160_tb_and_of_a_small_one_half() -> None:
    assert token_files(40e12, 128_256).bytes == 160e12
    assert token_files(40e12, 50_304).bytes == 80e12


def test_what_a_tier_needs_follows_from_its_stall_interval_and_load() -> None:
    need = tier_need(Tier("remote", 3600.0, 2.0, 600.0, 1.0), 4.8e12, gpus=16_000, nodes=2_000)
    assert need.stall_a_gpu == pytest.approx(4.8e12 / 16_000 / 2)
    assert need.write == pytest.approx(4.8e12 / 3600)
    assert need.write_a_node == pytest.approx(need.write / 2_000)
    assert need.read == pytest.approx(8e9)
    text = "\n".join(need.explain())
    assert "4.8 TB / 16,000 / 2 s = 150 MB/s" in text
    assert "4.8 TB / 10 min = 8 GB/s" in text


def test_a_run_needs_what_it_saves_in_its_master_format_and_one_pass_over_its_tokens(run: Run, h100s: Cluster) -> None:
    needed = storage_of(run, h100s, step_seconds=10.0)
    assert needed.checkpoint.bytes == 12 * LLAMA
    assert needed.checkpoint.bytes_kept == 4 * 12 * LLAMA
    assert needed.tokens.bytes == pytest.approx(4 * 15.6e12, rel=1e-5)
    assert needed.tokens.bytes >= 4 * 15.6e12
    assert [need.tier for need in needed.tiers] == list(THREE_TIERS)
    assert needed.loaders.tokens_per_s == pytest.approx(2048 * 8192 / 10)
    small = run.model_copy(update={"precision": Precision(master="bf16")})
    assert storage_of(small, h100s, 10.0).checkpoint.bytes == 6 * LLAMA


@pytest.mark.parametrize(("every", "most"), [("30min", 4), (None, 1), ("never", 0)])
def test_a_run_that_saves_at_its_end_or_never_has_one_checkpoint_on_disk_or_none(
    run: Run, h100s: Cluster, every: str | None, most: int
) -> None:
    storage = storage_of(run.model_copy(update={"checkpoint": Checkpoint(every=every, keep=3)}), h100s, 5.5)
    assert storage.checkpoint.bytes_kept == most * storage.checkpoint.bytes


def test_each_stage_of_a_share_reads_its_tokens_on_a_node_of_its_own(run: Run, h100s: Cluster) -> None:
    loaders = storage_of(run, h100s, step_seconds=10.0).loaders
    assert loaders.readers == 16  # pp 16, and the 8 ranks of tp fill a node
    assert loaders.read == pytest.approx(16 * 4 * 2048 * 8192 / 10)
    assert loaders.read_a_node == pytest.approx(loaders.read / 2048)


def test_the_runs_own_checkpoints_are_a_tier_of_its_interval(run: Run, h100s: Cluster) -> None:
    def tier(every: int | str | None) -> Tier:
        return tier_of(run.model_copy(update={"checkpoint": Checkpoint(every=every)}), h100s, 10.0)

    part = 12 * LLAMA / 16_384 / 2**30
    assert tier(100) == Tier("checkpoint", 1000.0, 0.02 * part, 0.6 * part, 1.0)
    assert tier("30min").interval == 1800.0
    with pytest.raises(UserError, match="nothing is saved before the end"):
        tier(None)


@pytest.mark.parametrize(
    ("grid", "per_node", "nodes"),
    [
        (Grid(tp=8), 8, 1),
        (Grid(tp=8, cp=4), 8, 4),
        (Grid(pp=4, tp=2), 8, 1),
        (Grid(pp=4, shard=4, tp=2), 8, 4),
        (Grid(shard=64), 8, 1),
        (Grid(shard=4, tp=3), 4, 2),
        (Grid(pp=2, replicate=2, shard=1, tp=2), 4, 2),
    ],
)
def test_the_nodes_that_read_a_token_are_those_of_the_ranks_of_its_share(grid: Grid, per_node: int, nodes: int) -> None:
    where: dict[int, set[int]] = {}
    for rank in range(grid.world):
        role = grid.role(rank)
        where.setdefault(role.replicate * grid.shard + role.shard, set()).add(rank // per_node)
    assert nodes_that_read_a_token(grid, per_node) == max(map(len, where.values())) == nodes


def test_every_figure_is_explained_and_goes_into_json(run: Run, h100s: Cluster) -> None:
    needed = storage_of(run, h100s, step_seconds=10.0)
    text = "\n".join(needed.explain())
    for figure in ("(master 4 + moments 8) bytes x 405.9B", "4.87 TB", "(3 + 1) x 4.87 TB", "62.4 TB", "remote"):
        assert figure in text
    values = json.loads(json.dumps(needed.json()))
    assert values["checkpoint"]["bytes"] == 12 * LLAMA
    assert values["tiers"][0]["write"] == pytest.approx(12 * LLAMA / 300)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: checkpoint_size(0), "parameters is 0"),
        (lambda: checkpoint_size(1e9, moments=-8), "moments is -8"),
        (lambda: checkpoint_size(1e9, master=0, moments=0), "bytes a parameter is 0"),
        (lambda: checkpoint_size(1e9, keep=0), "checkpoints that are kept is 0"),
        (lambda: token_files(-1, 100), "tokens is -1"),
        (lambda: token_files(1e9, 0), "vocabulary is 0"),
        (lambda: tier_need(THREE_TIERS[0], 1e9, 8, 0), "nodes is 0"),
        (lambda: tier_need(THREE_TIERS[0], 1e9, 8, 9), "9 nodes contradict 8 GPUs"),
        (lambda: tier_need(Tier("a", 10.0, 0.0, 1.0, 1.0), 1e9, 8, 1), "stall of tier a is 0"),
        (lambda: storage_of(llama_405b(), cluster(by_name("h100"), 16_384), 0.0), "time of a step is 0"),
    ],
)
def test_what_cannot_be_is_refused_with_the_number(wrong: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError) as raised:
        wrong()
    assert says in str(raised.value)
