"""Stages hold all layers in order, and no other split has a cheaper stage that is the most expensive, or a fullest rank
that is less full.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.run import Data, Model, Parallel, Run, Source
from fivefold.errors import UserError
from fivefold.model.spec import layer_shapes
from fivefold.pipeline.memory_balance import peak_bytes
from fivefold.pipeline.of_run import schedule_of_run
from fivefold.pipeline.stage_bytes import ByteCount
from fivefold.pipeline.stages import stage_layers
from tests.config.test_presets import preset

SMALL = Model(layers=5, hidden=48, heads=12, kv_heads=4, head_dim=8, ffn=80, vocab=1003)


def run_of(model: Model, **parallel: Any) -> Run:
    """The model on one replica of a pipeline, with 8 microbatches a step."""
    return Run(
        name="a",
        steps=1,
        model=model,
        data=Data(train=[Source(path="x")], seq_len=64),
        parallel=Parallel(dp=1, **parallel),
    )


def counts(model: Model, pp: int, chunks: int = 1, **parallel: Any) -> list[int]:
    return [len(layers) for layers in stage_layers(run_of(model, pp=pp, chunks=chunks, **parallel))]


def test_llama_405b_on_16_stages_has_fewer_layers_at_both_ends() -> None:
    """As its authors trained it: one layer less on the first and on the last stage (section 3.3.2 of the report)."""
    assert counts(preset("llama-3-405b"), 16) == [7, *[8] * 14, 7]


def test_one_stage_is_the_model_even_while_its_vocabulary_is_unknown() -> None:
    unknown = SMALL.model_copy(update={"vocab": "auto"})
    assert stage_layers(run_of(unknown)) == [range(5)]
    with pytest.raises(UserError, match=r"model\.vocab is auto"):
        stage_layers(run_of(unknown, pp=2))
    with pytest.raises(UserError, match=r"model\.vocab is auto"):
        stage_layers(run_of(unknown, pp=2, layers_per_stage="memory"))


def test_as_many_stages_as_layers_have_one_each() -> None:
    assert counts(SMALL, 5) == [1] * 5


def test_a_large_vocabulary_leaves_the_ends_one_layer() -> None:
    large = SMALL.model_copy(update={"vocab": 10**6, "layers": 12})
    assert counts(large, 4) == [1, 5, 5, 1]
    assert counts(large, 2) == [6, 6]


def test_a_vocabulary_that_costs_almost_nothing_only_decides_ties() -> None:
    tiny = SMALL.model_copy(update={"vocab": 1, "layers": 10})
    assert counts(tiny, 4) == [2, 3, 3, 2]
    assert counts(tiny, 3) == [3, 4, 3]


def test_of_inner_stages_the_later_ones_get_more_since_they_keep_fewer_activations() -> None:
    tiny = SMALL.model_copy(update={"vocab": 1, "layers": 9})
    assert counts(tiny, 4) == [2, 2, 3, 2]


def test_of_equal_choices_the_ends_have_fewer_layers() -> None:
    """A vocabulary that costs exactly a layer: [1, 2, 3, 2] has its most expensive stage at three units too."""
    rows = sum(math.prod(shape) for shape in layer_shapes(SMALL).values() if len(shape) == 2) // SMALL.hidden
    model = SMALL.model_copy(update={"layers": 8, "vocab": rows})
    assert counts(model, 4) == [1, 3, 3, 1]
    assert counts(model.model_copy(update={"layers": 9}), 4) == [1, 3, 3, 2]


def test_a_tied_head_costs_what_a_head_of_its_own_costs() -> None:
    model = SMALL.model_copy(update={"layers": 12})
    assert counts(model.model_copy(update={"tied": True}), 4) == counts(model, 4)


def test_chunks_make_as_many_stages_as_pp_times_chunks() -> None:
    assert stage_layers(run_of(SMALL.model_copy(update={"vocab": 1}), pp=2, chunks=2)) == [
        range(1),
        range(1, 2),
        range(2, 4),
        range(4, 5),
    ]


def test_the_run_file_may_say_how_many_layers_each_stage_has() -> None:
    assert stage_layers(run_of(SMALL, pp=3, layers_per_stage=[1, 3, 1])) == [range(1), range(1, 4), range(4, 5)]


def splits(layers: int, stages: int) -> list[list[int]]:
    """Every way to give each of the stages a layer or more."""
    if stages == 1:
        return [[layers]]
    return [[n, *rest] for n in range(1, layers - stages + 2) for rest in splits(layers - n, stages - 1)]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3000), st.integers(1, 400))
def test_no_split_is_cheaper_and_none_of_equal_cost_is_more_even(layers: int, pp: int, vocab: int, ffn: int) -> None:
    pp = min(pp, layers)
    model = SMALL.model_copy(update={"layers": layers, "vocab": vocab, "ffn": ffn})
    a_layer = sum(rows * columns for rows, columns in (s for s in layer_shapes(model).values() if len(s) == 2))

    def rank(split: list[int]) -> tuple[int, int, int]:
        costs = [n * a_layer for n in split]
        costs[0] += vocab * model.hidden
        costs[-1] += vocab * model.hidden
        return max(costs), sum(cost**2 for cost in costs), split[0] + split[-1]

    assert rank(counts(model, pp)) == min(rank(split) for split in splits(layers, pp))


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 4), st.integers(1, 200_000))
def test_stages_are_contiguous_and_cover_all_layers_and_none_is_empty(
    layers: int, pp: int, chunks: int, vocab: int
) -> None:
    layers = max(layers, pp * chunks)
    found = stage_layers(run_of(SMALL.model_copy(update={"layers": layers, "vocab": vocab}), pp=pp, chunks=chunks))
    assert len(found) == pp * chunks
    assert (found[0].start, found[-1].stop) == (0, layers)
    assert all(before.stop == after.start for before, after in pairwise(found))
    assert all(len(stage) > 0 for stage in found)


def fullest(run: Run, split: list[int]) -> float:
    """Bytes of the fullest rank with so many layers a stage."""
    schedule, count = schedule_of_run(run), ByteCount(run)
    last = len(split) - 1
    stages = [count.stage(n, n * count.mean_kept(), stage == 0, stage == last) for stage, n in enumerate(split)]
    return max(
        sum(stages[stage].state for stage in schedule.stages_of(rank)) + peak_bytes(schedule, rank, stages)
        for rank in range(len(schedule.ranks))
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(2, 4),
    st.integers(1, 3000),
    st.sampled_from(["1f1b", "gpipe", "naive", "zb-h1", "zb-h2"]),
    st.integers(1, 40),
)
def test_no_split_has_a_less_full_fullest_rank(layers: int, pp: int, vocab: int, schedule: str, sequences: int) -> None:
    model = SMALL.model_copy(update={"layers": max(layers, pp), "vocab": vocab})
    run = run_of(model, pp=pp, schedule=schedule, layers_per_stage="memory")
    run = run.model_copy(update={"batch": run.batch.model_copy(update={"global_size": sequences})})
    found = [len(stage) for stage in stage_layers(run)]
    assert sum(found) == model.layers
    assert fullest(run, found) == pytest.approx(min(fullest(run, split) for split in splits(model.layers, pp)))


def test_by_memory_early_ranks_of_1f1b_have_fewer_layers_and_those_of_gpipe_as_many() -> None:
    """Under 1f1b rank r of p keeps p - r microbatches, under gpipe each keeps all of them.

    Where activations are nearly all, 24 layers divide as 1/4 : 1/3 : 1/2 : 1; weights, which layers have, even it out.
    """
    model = SMALL.model_copy(update={"layers": 24, "vocab": 1})
    long = run_of(model, pp=4, layers_per_stage="memory")
    long = long.model_copy(update={"data": long.data.model_copy(update={"seq_len": 2**20})})
    assert [len(layers) for layers in stage_layers(long)] == [3, 4, 6, 11]
    assert counts(model, 4, layers_per_stage="memory") == [5, 6, 6, 7]
    assert counts(model, 4, schedule="gpipe", layers_per_stage="memory") == [6, 6, 6, 6]


def test_by_memory_the_layers_of_a_rank_are_spread_evenly_over_its_stages() -> None:
    model = SMALL.model_copy(update={"layers": 23, "vocab": 1})
    for schedule, placement in (("interleaved", (0, 1, 2, 0, 1, 2)), ("zb-v", (0, 1, 2, 2, 1, 0))):
        found = counts(model, 3, 2, schedule=schedule, layers_per_stage="memory")
        assert sum(found) == 23
        for rank in range(3):
            early, late = (count for count, holder in zip(found, placement, strict=True) if holder == rank)
            assert late - early in (0, 1)
