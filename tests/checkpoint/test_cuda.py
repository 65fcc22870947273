"""Saving from and loading into GPU memory: the copy is done when `save` returns, and it goes through pinned memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fivefold.checkpoint.checkpointer import Checkpointer
from tests.checkpoint.example import Events, assert_holds, assert_same, blank, whole

pytestmark = pytest.mark.gpu


def test_the_file_holds_what_the_gpu_held_when_save_was_called(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2, on_event=Events())
    tensors = {name: tensor.cuda() for name, tensor in whole(1).items()}
    checkpointer.save(1, tensors, {"step": 1})
    assert all(copy.is_pinned() for copy in checkpointer._snapshot.copies.values() if copy.numel())
    for tensor in tensors.values():
        tensor.zero_()
    assert_holds(checkpointer.latest(), 1)


def test_work_queued_before_the_save_is_in_it(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2, on_event=Events())
    matrix = torch.eye(4096, device="cuda")
    for _ in range(50):
        matrix = matrix @ torch.eye(4096, device="cuda") * 1.0
    matrix += 1
    checkpointer.save(1, {"model.matrix": matrix}, {"step": 1})
    matrix.fill_(7)
    loaded = {"model.matrix": torch.zeros(4096, 4096, device="cuda")}
    checkpointer.load(checkpointer.latest(), loaded)
    assert torch.equal(loaded["model.matrix"].cpu(), torch.eye(4096) + 1)


def test_what_was_saved_on_the_cpu_loads_on_the_gpu(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=2, on_event=Events())
    checkpointer.save(2, whole(2), {"step": 2})
    tensors = {name: tensor.cuda() for name, tensor in blank(whole(2)).items()}
    checkpointer.load(checkpointer.latest(), tensors)
    assert_same({name: tensor.cpu() for name, tensor in tensors.items()}, whole(2))
