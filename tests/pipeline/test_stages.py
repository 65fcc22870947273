"""Stages hold all layers in order, and no other split has a busiest rank that is less busy, or a fullest rank that is
less full.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.run import Data, Experts, Model, Parallel, Run, Source
from fivefold.errors import UserError
from fivefold.model.spec import layer_shapes
from fivefold.pipeline.memory_balance import peak_bytes
from fivefold.pipeline.named import placement_of
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


def test_sixteen_layers_on_two_ranks_leave_the_rank_that_has_the_head_fewer() -> None:
    """The head costs 2.4 layers, the embedding 0.3. With zb-v both are rank 0's: balancing each stage by itself gave it
    6 layers, 8.7 layers' work, and rank 1 ten.
    """
    model = preset("llama-3-8b").model_copy(update={"layers": 16, "vocab": 128_256})
    assert counts(model, 2) == [9, 7]
    assert counts(model, 2, 2, schedule="zb-v") == [5, 4, 5, 2]
    assert counts(model, 2, 2, schedule="interleaved") == [4, 5, 5, 2]


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
    """Of two ranks only the last one has a single layer, since the embedding costs less than the head."""
    large = SMALL.model_copy(update={"vocab": 10**6, "layers": 12})
    assert counts(large, 4) == [1, 5, 5, 1]
    assert counts(large, 2) == [11, 1]
    assert counts(large, 2, 2, schedule="interleaved") == [1, 1, 9, 1]
    assert counts(large, 2, 2, schedule="zb-v") == [1, 5, 5, 1]


def test_a_vocabulary_that_costs_almost_nothing_only_decides_ties() -> None:
    tiny = SMALL.model_copy(update={"vocab": 1, "layers": 10})
    assert counts(tiny, 4) == [2, 3, 3, 2]
    assert counts(tiny, 3) == [3, 4, 3]


def test_of_inner_stages_the_later_ones_get_more_since_they_keep_fewer_activations() -> None:
    tiny = SMALL.model_copy(update={"vocab": 1, "layers": 9})
    assert counts(tiny, 4) == [2, 2, 3, 2]


@pytest.mark.parametrize(
    ("layers", "head_layers", "split"),
    [
        (8, 1, [2, 2, 3, 1]),
        (9, 1, [2, 3, 3, 1]),
        (10, 1, [2, 3, 3, 2]),
        (7, 8, [1, 2, 3, 1]),
        (8, 8, [1, 3, 3, 1]),
        (9, 8, [2, 3, 3, 1]),
    ],
)
def test_of_equal_choices_the_ends_have_fewer_layers(layers: int, head_layers: int, split: list[int]) -> None:
    """With a head of exactly a layer the last stage ties with inner ones; with one of eight layers the first does."""
    rows = sum(math.prod(shape) for shape in layer_shapes(SMALL, 0).values() if len(shape) == 2) // SMALL.hidden
    assert counts(SMALL.model_copy(update={"layers": layers, "vocab": head_layers * rows}), 4) == split


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


def rank_costs(model: Model, placement: tuple[int, ...], split: list[int]) -> list[list[Fraction]]:
    """By rank, what each of its stages costs: weights of layers and of the head, and an eighth of the embedding's."""
    layer = sum(math.prod(shape) for shape in layer_shapes(model, 0).values() if len(shape) == 2)
    head = Fraction(model.vocab * model.hidden)
    costs = [n * layer + Fraction(0) for n in split]
    costs[0] += head / 8
    costs[-1] += head
    return [
        [cost for cost, holder in zip(costs, placement, strict=True) if holder == rank]
        for rank in range(max(placement) + 1)
    ]


MIXTURES = [
    ("1f1b", 2, 1, {"dense_layers": 3, "ffn": 5}),
    ("1f1b", 3, 1, {"dense_layers": 2, "ffn": 60}),
    ("1f1b", 4, 1, {"dense_layers": 4, "ffn": 30, "shared": 1}),
    ("zb-v", 2, 2, {"dense_layers": 1, "ffn": 90}),
    ("zb-v", 3, 2, {"dense_layers": 3, "ffn": 4}),
    ("interleaved", 2, 2, {"dense_layers": 2, "ffn": 40}),
    ("interleaved", 2, 3, {"dense_layers": 1, "ffn": 100}),
]
"""Schedule, ranks and chunks, and a mixture whose dense layers, of width 80, take more than the others, or less."""


def mixture(further: int = 0, **given: Any) -> Model:
    moe = Experts(**({"experts": 8, "top_k": 3} | given))
    return SMALL.model_copy(update={"layers": 9, "moe": moe, "mtp": further})


def stage_ranges(split: list[int]) -> list[range]:
    return [range(end - n, end) for n, end in zip(split, accumulate(split), strict=True)]


@pytest.mark.parametrize(("schedule", "pp", "chunks", "moe"), MIXTURES)
@pytest.mark.parametrize("further", [0, 1])
def test_where_layers_differ_no_split_has_a_less_busy_busiest_rank(
    schedule: str, pp: int, chunks: int, moe: dict[str, int], further: int
) -> None:
    model, placement = mixture(further, **moe), placement_of(schedule, pp, chunks)
    dense, routed = 3 * 48 * 80, 3 * 48 * 3 * moe["ffn"] + 3 * 48 * moe["ffn"] * moe.get("shared", 0) + 8 * 48
    attention = 48 * (12 + 2 * 4) * 8 + 48 * 96
    head = 1003 * 48

    def busiest(split: list[int]) -> Fraction:
        costs = [
            Fraction(sum(attention + (dense if n < moe["dense_layers"] else routed) for n in layers))
            for layers in stage_ranges(split)
        ]
        costs[0] += Fraction(head, 8)
        costs[-1] += head + further * (head + attention + routed + 2 * 48 * 48)
        return max(
            sum(cost for cost, holder in zip(costs, placement, strict=True) if holder == rank) for rank in range(pp)
        )

    found = counts(model, pp, chunks, schedule=schedule)
    assert busiest(found) == min(map(busiest, splits(9, pp * chunks)))


@pytest.mark.parametrize(("schedule", "pp", "moe"), [(s, pp, moe) for s, pp, _, moe in MIXTURES if s == "1f1b"])
def test_where_layers_differ_no_split_has_a_less_full_fullest_rank(schedule: str, pp: int, moe: dict[str, int]) -> None:
    run = run_of(mixture(**moe), pp=pp, schedule=schedule, layers_per_stage="memory")
    order, count = schedule_of_run(run), ByteCount(run)

    def fullest(split: list[int]) -> float:
        stages = [count.stage(layers, stage == 0, stage == pp - 1) for stage, layers in enumerate(stage_ranges(split))]
        return max(stages[rank].state + peak_bytes(order, rank, stages) for rank in range(pp))

    found = [len(layers) for layers in stage_layers(run)]
    assert fullest(found) == pytest.approx(min(map(fullest, splits(9, pp))))


def test_deepseek_v3_leaves_the_stage_with_the_further_prediction_one_layer() -> None:
    """Two heads and the block: 4.3 layers' work, of which the further one is 2.8."""
    model = preset("deepseek-v3")
    assert counts(model, 16) == [*[4] * 15, 1]
    assert counts(model.model_copy(update={"mtp": 0}), 16) == [3, *[4] * 14, 2]


def test_by_memory_a_stage_of_dense_layers_has_more_of_them() -> None:
    """A dense layer of DeepSeek-V3 has a twentieth of the parameters of one with experts."""
    first, *others = counts(preset("deepseek-v3"), 16, layers_per_stage="memory")
    assert first > max(others)


def squares(costs: list[Fraction]) -> Fraction:
    return sum((cost**2 for cost in costs), Fraction(0))


PLACEMENTS = [
    *(("1f1b", ranks, 1) for ranks in (1, 2, 3, 5)),
    *(("interleaved", ranks, chunks) for ranks, chunks in ((1, 3), (2, 2), (2, 3), (3, 2))),
    *(("zb-v", ranks, 2) for ranks in (1, 2, 3)),
]
"""Schedule, ranks and chunks: one stage a rank, stages that go around, and stages that go down and up again."""


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10), st.sampled_from(PLACEMENTS), st.integers(1, 3000), st.integers(1, 400))
def test_no_split_has_a_less_busy_busiest_rank_and_of_equal_ones_none_is_more_even(
    layers: int, placed: tuple[str, int, int], vocab: int, ffn: int
) -> None:
    """Ranks come first, then the stages of each; where all of it is equal, the ends have the fewest layers."""
    schedule, pp, chunks = placed
    placement = placement_of(schedule, pp, chunks)
    model = SMALL.model_copy(update={"layers": max(layers, pp * chunks), "vocab": vocab, "ffn": ffn})

    def order(split: list[int]) -> tuple[Fraction, Fraction]:
        busy = [sum(stages, Fraction(0)) for stages in rank_costs(model, placement, split)]
        return max(busy), squares(busy)

    def order_within(split: list[int]) -> tuple[list[Fraction], list[Fraction], int]:
        ranks = rank_costs(model, placement, split)
        return [max(stages) for stages in ranks], [squares(stages) for stages in ranks], split[0] + split[-1]

    def layers_by_rank(split: list[int]) -> list[int]:
        return [sum(n for n, holder in zip(split, placement, strict=True) if holder == rank) for rank in range(pp)]

    found = counts(model, pp, chunks, schedule=schedule)
    every = splits(model.layers, pp * chunks)
    assert order(found) == min(map(order, every))
    alike = [split for split in every if layers_by_rank(split) == layers_by_rank(found)]
    assert order_within(found) == min(map(order_within, alike))


@pytest.fixture
def own_schedule(tmp_path: Path) -> Path:
    """A schedule whose rank 0 has three of four stages."""
    path = tmp_path / "mine.csv"
    path.write_text("0F0,1F0,2F0,,,2B0,1B0,0B0\n,,,3F0,3B0\n")
    return path


def test_a_schedule_from_a_file_says_which_stages_make_up_a_rank(own_schedule: Path) -> None:
    model = SMALL.model_copy(update={"layers": 12, "vocab": 1})
    assert counts(model, 2, 2, schedule=str(own_schedule)) == [2, 2, 2, 6]


def test_only_what_is_balanced_needs_the_file_of_the_schedule(own_schedule: Path) -> None:
    own_schedule.unlink()
    for wanted in ("auto", "memory"):
        with pytest.raises(UserError, match=r"parallel\.schedule = .*mine\.csv cannot be read: .*No such file"):
            counts(SMALL, 2, 2, schedule=str(own_schedule), layers_per_stage=wanted)
    assert counts(SMALL, 2, 2, schedule=str(own_schedule), layers_per_stage=[1, 1, 2, 1]) == [1, 1, 2, 1]


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
    stages = [count.mean_stage(n, stage == 0, stage == last) for stage, n in enumerate(split)]
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
