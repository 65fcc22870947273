"""What the loop owes its reader: every step's line, the length that was asked for, one wish to stop taken once."""

import math
import os
import signal
import threading

import pytest

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.data.loader import IGNORE, validation_batches
from fivefold.observe.metrics import MetricsFile
from fivefold.train.meter import Meter
from fivefold.train.signals import stop_on_signals

QUIET = ("--validate.every", "null", "--optim.warmup_fraction", "0.2")


class LateMeter(Meter):
    """Reads each step one step late, as on a GPU."""

    late = None

    def push(self, *arguments, **asks):
        before, self.late = self.late, None
        self.late = super().push(*arguments, **asks)
        return before

    def flush(self):
        if self.pending is not None:
            return super().flush()
        late, self.late = self.late, None
        return late


@pytest.mark.parametrize("flags", [("--checkpoint.every", "never"), ("--checkpoint.every", "null"), ()])
def test_no_step_lacks_its_line_where_steps_are_read_late(trainer, monkeypatch, flags):
    """Without a checkpoint or a validation at the end the last step's line was never written."""
    monkeypatch.setattr("fivefold.train.opening.Meter", LateMeter)
    trainer.train(*QUIET, "--steps", "5", *flags)
    assert [line["step"] for line in trainer.metrics()] == [1, 2, 3, 4, 5]


def test_a_run_of_so_many_tokens_reads_them_also_when_the_batch_changes(trainer):
    """The steps were counted as if all of them had had today's batch, so that half of the tokens were left out."""
    tokens = ("--steps", "null", "--tokens", str(20 * 8 * 32))
    trainer.train(*QUIET, *tokens, stop_after=10)
    trainer.train(*QUIET, *tokens, "--batch.global_size", "16")
    lines = trainer.metrics()
    assert [line["step"] for line in lines] == list(range(1, 16))
    assert lines[-1]["tokens"] == 20 * 8 * 32
    assert lines[-1]["lr"] == pytest.approx(3e-4)
    assert "is finished" in trainer.train(*QUIET, *tokens, "--batch.global_size", "16")
    trainer.train(*QUIET, "--steps", "null", "--tokens", str(21 * 8 * 32), "--batch.global_size", "8")
    assert trainer.metrics()[-1]["tokens"] == 21 * 8 * 32


def test_the_same_signal_sent_twice_is_one_wish_and_a_later_one_ends_the_process(monkeypatch):
    """Slurm and systemd signal launcher and workers alike: the second SIGTERM ended workers before they saved."""
    ended = []
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    clock = iter([100.0, 100.1, 101.0, 103.0])
    monkeypatch.setattr("fivefold.train.signals.time.monotonic", lambda: next(clock))
    try:
        with stop_on_signals() as wish:
            assert not wish
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            assert wish.signal == signal.SIGTERM
            assert ended == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert ended == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_validation_without_a_label_is_undefined_and_no_crash(trainer, monkeypatch):
    """The windows chosen of a large set can all be without a target."""

    def unlabelled(*arguments):
        for batch in validation_batches(*arguments):
            batch.labels.fill_(IGNORE)
            yield batch

    monkeypatch.setattr("fivefold.train.job.validation_batches", unlabelled)
    trainer.train("--steps", "2")
    assert [math.isnan(line["val_loss/held"]) for line in trainer.metrics() if "val_loss/held" in line] == [True, True]


def test_a_run_can_be_trained_in_a_thread_that_may_not_catch_signals(trainer):
    thread = threading.Thread(target=trainer.train, args=(*QUIET, "--steps", "2"))
    thread.start()
    thread.join()
    assert [line["step"] for line in trainer.metrics()] == [1, 2]


def test_a_run_without_checkpoints_does_not_promise_to_go_on(trainer):
    output = trainer.train(*QUIET, "--checkpoint.every", "never", stop_after=2)
    assert "stopped as asked at step 2 of 60; nothing was saved: checkpoint.every is never" in output


def test_the_lines_of_a_step_are_on_the_disk_before_its_checkpoint(trainer, monkeypatch):
    """After a power cut a checkpoint without its lines would leave a hole in metrics.jsonl that no resume fills."""
    order = []
    sync, save = MetricsFile.sync, Checkpointer.save
    monkeypatch.setattr(MetricsFile, "sync", lambda self: (sync(self), order.append("lines"))[0])
    monkeypatch.setattr(
        Checkpointer, "save", lambda self, step, *rest: (order.append(step), save(self, step, *rest))[1]
    )
    trainer.train(*QUIET, "--steps", "6", "--checkpoint.every", "2")
    assert order[:6] == ["lines", 2, "lines", 4, "lines", 6]
