"""The stream of targets that the train loop itself delivers, over epochs, stops and resumes.

Token k of the set has the id k, so what a label says is its place. One resume proves little: here are three, in three
epochs, and one exactly between two epochs.
"""

import numpy as np
import pytest

from fivefold.data.loader import IGNORE, Loader
from fivefold.data.writer import TokenWriter

WINDOWS, SEQ, GLOBAL = 100, 32, 5
TOKENS = WINDOWS * SEQ + 1
EPOCH = WINDOWS // GLOBAL  # steps
LENGTHS = [1, 200, 3, 33, 64, 700, 32]


@pytest.fixture
def delivered(monkeypatch):
    """The targets of each step that a run was given, as a list of lists, since it was last emptied."""
    steps = []
    real = Loader.__next__

    def recorded(self):
        step = real(self)
        labels = [each.labels[each.labels != IGNORE].tolist() for each in step.microbatches]
        steps.append([place for some in labels for place in some])
        return step

    monkeypatch.setattr(Loader, "__next__", recorded)
    return steps


@pytest.fixture
def flags(trainer):
    """A run of three epochs over one hundred samples."""
    lengths = [*LENGTHS, TOKENS - sum(LENGTHS)]
    writer = TokenWriter(trainer.file.parent / "places", TOKENS, eod=0)
    writer.write(np.arange(TOKENS), np.array(lengths))
    writer.close()
    return (
        *("--data.train.0.path", str(trainer.file.parent / "places"), "--model.vocab", str(TOKENS)),
        *("--batch.global_size", str(GLOBAL), "--batch.micro_size", str(GLOBAL), "--steps", str(3 * EPOCH)),
        *("--model.hidden", "8", "--model.layers", "1", "--checkpoint.every", "null", "--validate.every", "null"),
    )


def targets():
    """Every place but the first of each document."""
    begins = np.cumsum([0, *LENGTHS])
    return sorted(set(range(TOKENS)) - set(begins.tolist()))


def take(steps):
    taken = list(steps)
    steps.clear()
    return taken


def test_stops_after_40_130_and_215_samples_join_into_the_unbroken_stream(trainer, flags, delivered):
    trainer.train(*flags, "--name", "whole")
    whole = take(delivered)
    for epoch in range(3):
        part = whole[epoch * EPOCH : (epoch + 1) * EPOCH]
        assert sorted(place for step in part for place in step) == targets(), f"epoch {epoch} is no permutation"
    assert whole[:EPOCH] != whole[EPOCH : 2 * EPOCH]

    joined = []
    for until, before in ((40, 0), (130, 40), (215, 130)):
        trainer.train(*flags, stop_after=(until - before) // GLOBAL)
        joined += take(delivered)
        assert len(joined) * GLOBAL == until
    trainer.train(*flags)
    assert joined + take(delivered) == whole
    assert [line["loss"] for line in trainer.metrics()] == [line["loss"] for line in trainer.metrics("whole")]


def test_a_checkpoint_exactly_at_the_end_of_an_epoch_goes_on_with_the_whole_next_one(trainer, flags, delivered):
    epochs = []
    for _ in range(2):
        trainer.train(*flags, stop_after=EPOCH)
        epochs.append([place for step in take(delivered) for place in step])
    assert [sorted(epoch) for epoch in epochs] == [targets(), targets()]
    assert epochs[0] != epochs[1]
    assert [line["step"] for line in trainer.metrics()] == list(range(1, 2 * EPOCH + 1))


def test_a_run_that_ended_with_its_epoch_goes_on_with_the_next_if_it_is_given_more_steps(trainer, flags, delivered):
    trainer.train(*flags, "--steps", str(EPOCH))
    take(delivered)
    assert "is finished" in trainer.train(*flags, "--steps", str(EPOCH))
    assert take(delivered) == []
    trainer.train(*flags, "--steps", str(EPOCH + 3))
    assert len(take(delivered)) == 3
    assert [line["step"] for line in trainer.metrics()] == list(range(1, EPOCH + 4))


def test_a_batch_of_another_size_goes_on_where_the_stream_was(trainer, flags, delivered):
    """The cursor counts samples: steps x the size of a batch would be another place after the size has changed."""
    trainer.train(*flags, "--name", "whole", "--steps", str(EPOCH))
    whole = [place for step in take(delivered) for place in step]
    trainer.train(*flags, "--steps", str(EPOCH), stop_after=8)
    larger = ("--batch.global_size", str(3 * GLOBAL), "--batch.micro_size", str(3 * GLOBAL))
    trainer.train(*flags, *larger, "--steps", "12")
    assert [place for step in delivered for place in step] == whole


@pytest.mark.parametrize("short_documents", [[40] * 1000, [40_000]], ids=["many", "joined"])
def test_two_sources_of_equal_weight_give_equal_numbers_of_tokens_whatever_their_documents(
    trainer, delivered, short_documents
):
    """Weights that count documents gave the source with long ones ten times its share (in another system)."""
    first, second = (trainer.file.parent / name for name in ("first", "second"))
    for folder, token, lengths in ((first, 1, short_documents), (second, 2, [4000] * 100)):
        writer = TokenWriter(folder, 3, eod=0)
        writer.write(np.full(sum(lengths), token), np.array(lengths))
        writer.close()
    sources = f"--data.train=[{{path: {first}}}, {{path: {second}}}]"
    trainer.train(sources, "--data.document_mask", "false", "--steps", "15", "--validate.every", "null")
    labels = [label for step in delivered for label in step]
    assert len(labels) == 15 * 8 * SEQ
    assert abs(labels.count(1) - labels.count(2)) <= SEQ


def test_a_source_of_three_times_the_weight_gives_three_times_the_tokens(trainer, delivered):
    for token, name in ((1, "first"), (2, "second")):
        writer = TokenWriter(trainer.file.parent / name, 3, eod=0)
        writer.write(np.full(4000, token), np.array([4000]))
        writer.close()
    first, second = (
        f"{{path: {trainer.file.parent / name}, weight: {weight}}}" for name, weight in (("first", 3), ("second", 1))
    )
    trainer.train(f"--data.train=[{first}, {second}]", "--steps", "10", "--validate.every", "null")
    labels = [label for step in delivered for label in step]
    assert (labels.count(1), labels.count(2)) == (60 * SEQ, 20 * SEQ)


def test_the_seed_of_the_run_file_chooses_the_weights_and_the_order(trainer, delivered):
    losses, orders = [], []
    for seed in ("0", "1"):
        trainer.train("--seed", seed, "--name", f"seed{seed}", "--steps", "2", "--validate.every", "1")
        losses.append(trainer.metrics(f"seed{seed}")[0]["val_loss/held"])
        orders.append(take(delivered))
    assert losses[0] != losses[1], "before the first step only the weights can differ"
    assert orders[0] != orders[1]
