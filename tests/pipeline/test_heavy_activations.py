"""Which layers' activations go to CPU memory: so many that no rank keeps more than the mean, and not one more."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.run import Model, Recompute, Run
from fivefold.pipeline.heavy import offloaded_layers
from fivefold.pipeline.memory_balance import peak_bytes
from fivefold.pipeline.of_run import schedule_of_run
from fivefold.pipeline.stage_bytes import ByteCount
from fivefold.pipeline.stages import stage_layers
from tests.pipeline.test_stages import SMALL, run_of

TINY_VOCABULARY = SMALL.model_copy(update={"vocab": 1})


def offloading(run: Run, *things: str) -> Run:
    return run.model_copy(update={"offload": list(things)})


def peaks(run: Run, offloaded: list[frozenset[int]]) -> list[float]:
    """Each rank's most bytes of activations, if these layers keep none on the device."""
    schedule, count, stages = schedule_of_run(run), ByteCount(run), stage_layers(run)
    last = len(stages) - 1
    held = []
    for number, layers in enumerate(stages):
        stage = count.stage(layers, number == 0, number == last)
        held.append(replace(stage, forward=stage.forward - sum(map(count.kept, offloaded[number]))))
    return [peak_bytes(schedule, rank, held) for rank in range(len(schedule.ranks))]


def test_early_ranks_of_1f1b_offload_down_to_the_mean_and_late_ones_nothing() -> None:
    """Ranks keep 4, 3, 2 and 1 microbatches of six layers each: the mean is 15 layers, so 24 and 18 are too many."""
    model = TINY_VOCABULARY.model_copy(update={"layers": 24})
    run = offloading(run_of(model, pp=4), "heavy-activations")
    assert [sorted(layers) for layers in offloaded_layers(run)] == [[0, 1, 2], [6], [], []]


def test_all_activations_are_those_of_all_layers_and_without_offload_of_none() -> None:
    run = run_of(TINY_VOCABULARY, pp=2, layers_per_stage=[2, 3])
    assert offloaded_layers(offloading(run, "activations")) == [{0, 1}, {2, 3, 4}]
    assert offloaded_layers(offloading(run, "optimizer")) == [frozenset(), frozenset()]
    further = run.model_copy(update={"model": run.model.model_copy(update={"mtp": 2})})
    assert offloaded_layers(offloading(further, "activations")) == [{0, 1}, {2, 3, 4, 5, 6}]


def test_ranks_that_keep_the_same_offload_nothing() -> None:
    model = TINY_VOCABULARY.model_copy(update={"layers": 8, "hidden": 24, "ffn": 8})
    run = offloading(run_of(model, pp=4, schedule="gpipe", layers_per_stage=[2, 2, 2, 2]), "heavy-activations")
    found = offloaded_layers(run)
    assert found[:3] == [frozenset()] * 3
    assert len(found[3]) <= 1  # what the head keeps is above the mean


def test_layers_that_recompute_count_as_what_they_keep() -> None:
    """Of the six layers of rank 0, number 0 and 3 keep a block's input; one that keeps everything has to go as well."""
    run = run_of(TINY_VOCABULARY.model_copy(update={"layers": 24}), pp=4)
    run = offloading(run.model_copy(update={"recompute": Recompute(mode="full", every=3)}), "heavy-activations")
    assert [sorted(layers) for layers in offloaded_layers(run)] == [[0, 1, 2], [6, 7], [], []]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [("1f1b", 1), ("zb-h2", 1), ("zb-v", 2), ("interleaved", 2), ("interleaved", 3), ("dualpipe-v", 2)]
    ),
    st.integers(2, 4),
    st.integers(0, 12),
    st.integers(1, 3000),
)
def test_no_rank_keeps_more_than_the_mean_while_it_has_a_layer_to_offload(
    schedule: tuple[str, int], pp: int, more: int, vocab: int
) -> None:
    name, chunks = schedule
    model: Model = SMALL.model_copy(update={"layers": pp * chunks + more, "vocab": vocab})
    run = offloading(run_of(model, pp=pp, chunks=chunks, schedule=name), "heavy-activations")
    found, stages, plan = offloaded_layers(run), stage_layers(run), schedule_of_run(run)
    nothing = [frozenset[int]()] * len(stages)
    before, after = peaks(run, nothing), peaks(run, found)
    for rank in range(pp):
        here = plan.stages_of(rank)
        layers = [(stage, layer) for stage in here for layer in stages[stage]]
        gone = [(stage, layer) for stage in here for layer in sorted(found[stage])]
        assert gone == layers[: len(gone)]
        assert after[rank] <= fmean(before) * (1 + 1e-9) or gone == layers
        if gone:
            stage, last = gone[-1]
            one_less = [kept - {last} if number == stage else kept for number, kept in enumerate(found)]
            assert peaks(run, one_less)[rank] > fmean(before) * (1 - 1e-9)
    assert max(after) <= max(before)
