"""Delivery: each target once, the same stream on any number of ranks and after any restart, counts that are right."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fivefold.data.loader import IGNORE, Loader, Microbatch, sample_numbers, sample_order, validation_batches
from fivefold.data.source import TokenSource
from fivefold.errors import UserError
from tests.data.corpora import write_set

SEQ = 16


class Counting(TokenSource):
    """A source whose token at place i is base + i, so that a delivered target says where it comes from."""

    def __init__(self, lengths: list[int], base: int = 0) -> None:
        self.name = f"counting from {base}"
        self.tokens, self.base = sum(lengths), base
        self.starts = np.cumsum([0, *lengths[:-1]])

    def read(self, start: int, count: int) -> np.ndarray:
        return np.arange(self.base + start, self.base + start + count)


BASE = 1_000_000


def load(sources: list[TokenSource], weights: list[float] | None = None, **options: object) -> Loader:
    """A loader of this file's usual sizes."""
    settings = {"seq_len": SEQ, "document_mask": True, "global_size": 8, "micro_size": 2, **options}
    order = sample_order(sources, weights or [1.0] * len(sources), SEQ, seed=11)
    return Loader(sources, order, **settings)  # type: ignore[arg-type]


Target = tuple[int, int, int]
"""Source, document and offset in it."""


def targets(sources: list[Counting], labels_s: torch.Tensor) -> list[Target]:
    """Where the targets of one row come from."""
    found = []
    for label in labels_s[labels_s != IGNORE].tolist():
        source, place = divmod(label, BASE)
        document = int(np.searchsorted(sources[source].starts, place, side="right")) - 1
        found.append((source, document, place - int(sources[source].starts[document])))
    return found


def stream(
    sources: list[Counting],
    samples: range,
    dp: int = 1,
    micro: int = 2,
    global_size: int = 8,
    weights: list[float] | None = None,
) -> list[Target]:
    """Every delivered target of these samples in the global order, put together from the ranks."""
    options = {"dp_size": dp, "micro_size": micro, "global_size": global_size, "samples": samples.start}
    loaders = [load(sources, weights, dp_rank=rank, **options) for rank in range(dp)]
    delivered: list[Target] = []
    while loaders[0].samples < samples.stop:
        steps = [next(loader) for loader in loaders]
        for parts in zip(*(step.microbatches for step in steps), strict=True):
            for row in (row for part in parts for row in part.labels):
                delivered += targets(sources, row)
    for loader in loaders:
        assert loader.samples == samples.stop
        loader.close()
    return delivered


def corpus() -> list[Counting]:
    """Two sources with documents of 1 to 60 tokens, some of exactly a sequence and one more."""
    rng = np.random.default_rng(4)
    return [
        Counting([*rng.integers(1, 60, 20).tolist(), SEQ, SEQ + 1, 1, 1, 3 * SEQ], 0),
        Counting(rng.integers(1, 200, 9).tolist(), BASE),
    ]


@pytest.mark.parametrize("document_mask", [True, False])
def test_an_epoch_has_each_target_exactly_once(document_mask: bool) -> None:
    sources = corpus()[:1]
    order = sample_order(sources, [1.0], SEQ, seed=0)
    windows = order.windows[0]
    with Loader(sources, order, seq_len=SEQ, document_mask=document_mask, global_size=windows, micro_size=1) as loader:
        step = next(loader)
    places = sorted(label for each in step.microbatches for label in each.labels.flatten().tolist() if label != IGNORE)
    starts = set(sources[0].starts.tolist()) if document_mask else {0}
    assert places == [place for place in range(sources[0].tokens) if place not in starts]
    assert step.labels == len(places)


@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 8), (2, 2), (2, 1), (4, 1), (4, 2)])
def test_the_stream_is_the_same_on_any_layout(dp: int, micro: int) -> None:
    sources = corpus()
    assert stream(sources, range(0, 96), dp, micro) == stream(sources, range(0, 96))


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_a_hundred_samples_three_epochs_and_three_restarts_join_into_the_unbroken_stream(dp: int) -> None:
    # A second resume once began the data again, and an offset survived into the next epoch (in other systems).
    sources = [Counting([37] * 43 + [10], 0)]
    assert sample_order(sources, [1.0], SEQ, 0).windows == [100]
    unbroken = stream(sources, range(0, 300), 1, 1, global_size=5)
    stops = [0, 40, 130, 215, 300]
    sizes = {"dp": dp, "micro": 1, "global_size": 5 if dp == 1 else dp}
    if dp > 1:  # stops on the same samples need a batch that divides the distance
        stops, unbroken = [0, 40, 132, 216, 300], stream(sources, range(0, 300), 1, 1, global_size=4)
    parts = [stream(sources, range(a, b), **sizes) for a, b in pairwise(stops)]
    assert [target for part in parts for target in part] == unbroken
    epochs = [stream(sources, range(at, at + 100), 1, 1, global_size=5) for at in (0, 100, 200)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_restart_at_any_cursor_continues_the_stream() -> None:
    sources = corpus()
    whole = stream(sources, range(0, 64), weights=[2, 1])
    for cursor in range(8, 64, 8):
        head = stream(sources, range(0, cursor), 2, 1, weights=[2, 1])
        tail = stream(sources, range(cursor, 64), 4, 2, weights=[2, 1])
        assert head + tail == whole


def test_every_rank_knows_the_labels_of_the_whole_step() -> None:
    sources = corpus()
    loaders = [load(sources, dp_rank=rank, dp_size=4) for rank in range(4)]
    for steps in zip(*(take(loader, 10) for loader in loaders), strict=True):
        counted = sum(int((each.labels != IGNORE).sum()) for step in steps for each in step.microbatches)
        assert {step.labels for step in steps} == {counted}
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("document_mask", [True, False])
@pytest.mark.parametrize("lengths", [[1, 1, 3, 2, 40, 1, 5, 16, 17, 9, 1, 70], [130], [4] * 30], ids=str)
def test_every_rank_knows_how_many_labels_each_depth_of_multi_token_prediction_has(
    lengths: list[int], document_mask: bool
) -> None:
    sources, depths = [Counting(lengths), Counting([7] * 9, BASE)], SEQ + 1
    options = {"document_mask": document_mask, "mtp": depths, "dp_size": 2}
    loaders = [load(sources, dp_rank=rank, **options) for rank in range(2)]
    for steps in zip(*(take(loader, 4) for loader in loaders), strict=True):
        rows = [row for step in steps for each in step.microbatches for row in each.tokens]
        expected = [sum(can_be_predicted(sources, row, depth, document_mask) for row in rows) for depth in range(18)]
        for step in steps:
            assert step.mtp_labels == tuple(expected[1:])
            assert step.labels == expected[0]
        assert expected[SEQ] == 0
    for loader in loaders:
        loader.close()


def can_be_predicted(sources: list[Counting], tokens_s: torch.Tensor, depth: int, document_mask: bool) -> int:
    """How many tokens of a window lie depth + 1 places after another one of it, and in the same document."""
    source, first = divmod(int(tokens_s[0]), BASE)
    places = range(first, int(tokens_s.max()) % BASE + 2)  # the last target is no input
    starts = sources[source].starts if document_mask else [0]
    document = {place: int(np.searchsorted(starts, place, side="right")) for place in places}
    return sum(document.get(place + depth + 1) == document[place] for place in places)


def take(loader: Loader, count: int) -> list:
    return [next(loader) for _ in range(count)]


def test_documents_are_numbered_inside_the_row_and_their_first_token_is_no_target() -> None:
    source = Counting([3, 1, 5, 100])
    (batch,) = list(validation_batches(source, SEQ, 16, 1, 0, 1, True))
    assert batch.documents is not None
    assert batch.documents[0].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3]
    assert batch.tokens[0].tolist() == list(range(16))
    assert batch.labels[0].tolist() == [1, 2, IGNORE, IGNORE, 5, 6, 7, 8, IGNORE, 10, 11, 12, 13, 14, 15, 16]
    assert batch.packed


def test_a_row_inside_one_document_is_not_packed_even_if_the_next_begins_at_its_last_target() -> None:
    (batch,) = list(validation_batches(Counting([SEQ, 50]), SEQ, 16, 1, 0, 1, True))
    assert not batch.packed
    assert batch.labels[0, -1] == IGNORE
    (whole,) = list(validation_batches(Counting([SEQ, 50]), SEQ, 16, 1, 0, 1, False))
    assert whole.documents is None
    assert whole.labels[0, -1] == SEQ


def test_a_microbatch_is_packed_if_any_of_its_rows_holds_two_documents() -> None:
    """If the last row alone decided, the tokens of the others would see across their documents, without an error."""
    (batch,) = list(validation_batches(Counting([3, 1, 5, 100]), SEQ, 48, 3, 0, 1, True))
    assert batch.documents is not None
    assert batch.documents[:, -1].tolist() == [3, 0, 0]
    assert batch.packed


def test_the_last_short_window_is_filled_with_the_end_token(tmp_path: Path) -> None:
    source = write_set(tmp_path / "a", [20])
    source.eod = 7  # 0 is what a fresh array holds anyway
    first, last = list(validation_batches(source, SEQ, 1000, 1, 0, 1, True))
    assert first.labels[0].tolist() == list(range(2, 18))
    assert last.tokens[0].tolist() == [17, 18, 19] + [7] * 13
    assert last.labels[0].tolist() == [18, 19, 0] + [IGNORE] * 13


def test_labels_and_tokens_of_neighbours_share_one_token() -> None:
    batches = list(validation_batches(Counting([65]), SEQ, 1000, 1, 0, 1, False))
    assert [each.tokens[0, 0].item() for each in batches] == [0, 16, 32, 48]
    assert [each.labels[0, -1].item() for each in batches] == [16, 32, 48, 64]


def test_sample_numbers_follow_accumulation_rank_and_row() -> None:
    assert sample_numbers(100, 12, 2, 1, 2).tolist() == [[102, 103], [106, 107], [110, 111]]


def test_weights_are_shares_of_tokens_whatever_the_documents_lengths() -> None:
    # Counting documents once gave the source with long documents ten times its share (in another system).
    def share(first: list[int]) -> float:
        sources = [Counting(first), Counting([4000] * 1000, BASE)]
        order = sample_order(sources, [1.0, 1.0], SEQ, 0)
        return float((order.locate(np.arange(1001))[0] == 0).sum())

    assert abs(share([40] * 1000) - 500.5) <= 0.5
    assert share([40_000]) == share([40] * 1000)


@pytest.mark.parametrize("lengths", [[3 * SEQ] * 200 + [2, 3], [20_000], [SEQ] * 10, [SEQ + 1] * 10])
def test_documents_of_any_length_are_delivered_whole(lengths: list[int]) -> None:
    source = Counting(lengths)
    windows = sample_order([source], [1.0], SEQ, 0).windows[0]
    delivered = stream([source], range(0, windows), 1, 1, global_size=windows)
    assert len(delivered) == source.tokens - len(lengths)
    assert len(set(delivered)) == len(delivered)


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize(("tokens", "windows"), [(13 * SEQ + 1, 13), (13 * SEQ - 4, 13), (5, 1), (2, 1)])
def test_validation_reads_each_window_once_with_as_many_microbatches_on_each_rank(
    dp: int, tokens: int, windows: int
) -> None:
    source = Counting([tokens])
    ranks = [list(validation_batches(source, SEQ, 10**6, 2, rank, dp, True)) for rank in range(dp)]
    assert len({len(batches) for batches in ranks}) == 1
    assert len(ranks[0]) == -(-windows // (2 * dp))
    assert all(each.tokens.shape == (2, SEQ) for batches in ranks for each in batches)
    labels = [
        label for batches in ranks for each in batches for label in each.labels.flatten().tolist() if label != IGNORE
    ]
    assert sorted(labels) == list(range(1, tokens))


def test_a_large_validation_set_gives_the_same_windows_spread_over_it() -> None:
    source = Counting([1000 * SEQ + 1])

    def firsts(dp: int) -> list[int]:
        batches = [
            each for rank in range(dp) for each in validation_batches(source, SEQ, 10 * SEQ + 3, 2, rank, dp, False)
        ]
        return sorted(
            int(row[0])
            for each in batches
            for row, labels in zip(each.tokens, each.labels, strict=True)
            if labels[0] > 0
        )

    assert firsts(1) == [k * 100 * SEQ for k in range(10)]
    assert firsts(2) == firsts(4) == firsts(1)


def test_bad_validation_sets_are_refused_at_once() -> None:
    with pytest.raises(UserError, match="has 0 tokens"):
        validation_batches(Counting([0]), SEQ, 100, 1, 0, 1, True)
    with pytest.raises(UserError, match="is no target, so nothing is left"):
        validation_batches(Counting([1, 1, 1]), SEQ, 100, 1, 0, 1, True)
    with pytest.raises(UserError, match=r"validate\.tokens 10 is less than one sequence: data\.seq_len is 16"):
        validation_batches(Counting([1000]), SEQ, 10, 1, 0, 1, True)


def test_a_corpus_shorter_than_a_sequence_is_refused_with_the_numbers() -> None:
    sample_order([Counting([SEQ + 1])], [1.0], SEQ, 0)
    with pytest.raises(UserError, match=r"has 16 tokens, but one sequence takes 17 .* at most 15"):
        sample_order([Counting([SEQ])], [1.0], SEQ, 0)


def test_sizes_that_do_not_divide_and_sources_without_a_target_are_refused() -> None:
    with pytest.raises(UserError, match=r"global_size 8 does not divide by batch\.micro_size 3 x dp 2 = 6"):
        load([Counting([100])], micro_size=3, dp_size=2)
    with pytest.raises(UserError, match="100 tokens in 100 documents"):
        load([Counting([1] * 100)])
    load([Counting([1] * 100)], document_mask=False).close()


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fivefold-loader"]


def test_closing_ends_the_thread_and_the_iteration() -> None:
    loader = load([Counting([1000])])
    next(loader)
    loader.close()
    loader.close()
    assert not loader_threads()
    with pytest.raises(StopIteration):
        next(loader)


def test_a_forgotten_loader_ends_its_thread() -> None:
    loader = load([Counting([1000])])
    (thread,) = loader_threads()
    del loader
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


class Failing(Counting):
    """Cannot be read beyond its hundredth token."""

    def read(self, start: int, count: int) -> np.ndarray:
        if start > 100:
            raise OSError("the disk went away")
        return super().read(start, count)


def test_an_error_while_reading_ahead_reaches_the_consumer() -> None:
    loader = load([Failing([1000])])
    with pytest.raises(OSError, match="the disk went away"):
        take(loader, 20)
    assert not loader_threads()


def test_a_microbatch_moves_with_all_its_parts() -> None:
    batch = next(iter(validation_batches(Counting([3, 50]), SEQ, 16, 1, 0, 1, True)))
    moved = batch.to("meta")
    assert isinstance(moved, Microbatch)
    assert {moved.tokens.device.type, moved.labels.device.type, moved.documents.device.type} == {"meta"}  # type: ignore[union-attr]
    assert moved.packed == batch.packed
    assert (batch.tokens.dtype, batch.labels.dtype, batch.documents.dtype) == (torch.int64, torch.int64, torch.int32)  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in loader_threads():
        thread.join(timeout=10)
    assert not loader_threads()
