"""Stages hold all layers in order, and no other split has a cheaper most expensive stage."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.run import Model, Parallel
from fivefold.errors import UserError
from fivefold.model.spec import layer_shapes
from fivefold.pipeline.stages import stage_layers
from tests.config.test_presets import preset

SMALL = Model(layers=5, hidden=48, heads=12, kv_heads=4, head_dim=8, ffn=80, vocab=1003)


def counts(model: Model, pp: int, chunks: int = 1) -> list[int]:
    return [len(layers) for layers in stage_layers(model, Parallel(pp=pp, chunks=chunks))]


def test_llama_405b_on_16_stages_has_fewer_layers_at_both_ends() -> None:
    """As its authors trained it: one layer less on the first and on the last stage (section 3.3.2 of the report)."""
    assert counts(preset("llama-3-405b"), 16) == [7, *[8] * 14, 7]


def test_one_stage_is_the_model_even_while_its_vocabulary_is_unknown() -> None:
    unknown = SMALL.model_copy(update={"vocab": "auto"})
    assert stage_layers(unknown, Parallel()) == [range(5)]
    with pytest.raises(UserError, match=r"model\.vocab is auto"):
        stage_layers(unknown, Parallel(pp=2))


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
    assert stage_layers(SMALL.model_copy(update={"vocab": 1}), Parallel(pp=2, chunks=2)) == [
        range(1),
        range(1, 2),
        range(2, 4),
        range(4, 5),
    ]


def test_the_run_file_may_say_how_many_layers_each_stage_has() -> None:
    parallel = Parallel(pp=3, layers_per_stage=[1, 3, 1])
    assert stage_layers(SMALL, parallel) == [range(1), range(1, 4), range(4, 5)]


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
    found = stage_layers(SMALL.model_copy(update={"layers": layers, "vocab": vocab}), Parallel(pp=pp, chunks=chunks))
    assert len(found) == pp * chunks
    assert (found[0].start, found[-1].stop) == (0, layers)
    assert all(before.stop == after.start for before, after in pairwise(found))
    assert all(len(stage) > 0 for stage in found)
