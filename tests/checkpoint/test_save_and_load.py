"""Saving and loading in one process: what is copied when, what stays on disk, what is refused and how."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
import torch

from fivefold.checkpoint import checkpointer as room
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.chunks import ChunkReader
from fivefold.checkpoint.files import BLOCK
from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.load import read_full, stored_names
from fivefold.checkpoint.manifest import DamageError
from fivefold.checkpoint.storage import Reader
from fivefold.errors import UserError
from tests.checkpoint.example import SHAPES, Events, assert_holds, assert_same, blank, names_in, whole


@pytest.fixture
def events() -> Events:
    return Events()


def checkpointer_in(run: Path, events: Events, keep: int = 3) -> Checkpointer:
    return Checkpointer(run / "checkpoints", keep=keep, on_event=events)


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step, whole(step), {"step": step})
    checkpointer.wait()


def test_an_empty_folder_has_no_latest(tmp_path: Path, events: Events) -> None:
    assert checkpointer_in(tmp_path, events).latest() is None
    assert events == []


def test_the_file_holds_the_values_from_when_save_was_called(
    tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, real_save = threading.Event(), room.dcp.save
    monkeypatch.setattr(room.dcp, "save", lambda *a, **k: (go_on.wait(30), real_save(*a, **k)))
    checkpointer = checkpointer_in(tmp_path, events)
    tensors, state = whole(1), {"step": 1, "nested": [1]}
    checkpointer.save(1, tensors, state)
    for tensor in tensors.values():
        tensor.zero_()
    state["nested"].append(2)
    go_on.set()
    checkpointer.wait()
    found = checkpointer.latest()
    assert found.state == {"step": 1, "nested": [1]}
    assert_same(dict(read_full(found, SHAPES)), whole(1))


def test_a_second_save_waits_for_the_first(tmp_path: Path, events: Events) -> None:
    checkpointer = checkpointer_in(tmp_path, events, keep=5)
    for step in range(1, 6):
        checkpointer.save(step, whole(step), {"step": step})
    checkpointer.close()
    assert [fields["step"] for fields in events.of("checkpoint_saved")] == [1, 2, 3, 4, 5]
    for step in range(1, 6):
        assert_holds(open_checkpoint(tmp_path, step), step)


def test_an_event_tells_size_and_times(tmp_path: Path, events: Events) -> None:
    save(checkpointer_in(tmp_path, events), 1)
    (fields,) = events.of("checkpoint_saved")
    assert fields["bytes"] == sum(f.stat().st_size for f in (tmp_path / "checkpoints/step-00000001").glob("[rt]*"))
    assert {"step", "stall_s", "write_s", "message"} <= fields.keys()


def test_state_keeps_every_number(tmp_path: Path, events: Events) -> None:
    state = {"float": 0.1 + 0.2, "big": 2**80, "inf": -math.inf, "nan": math.nan, "text": "é\n", "none": None}
    checkpointer = checkpointer_in(tmp_path, events)
    checkpointer.save(1, {}, state)
    loaded = checkpointer.load(checkpointer.latest(), {})
    assert math.isnan(loaded.pop("nan"))
    assert loaded == {name: value for name, value in state.items() if name != "nan"}


def test_the_newest_k_stay(tmp_path: Path, events: Events) -> None:
    checkpointer = checkpointer_in(tmp_path, events, keep=2)
    for step in (10, 20, 30, 40):
        save(checkpointer, step)
    assert names_in(tmp_path / "checkpoints") == ["step-00000030", "step-00000040"]
    with pytest.raises(ValueError, match="keep is 0"):
        checkpointer_in(tmp_path, events, keep=0)


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path, events: Events) -> None:
    first = checkpointer_in(tmp_path, events, keep=2)
    save(first, 1)
    save(first, 2)
    file = tmp_path / "checkpoints/step-00000002/rank-00000.bin"
    flipped = bytearray(file.read_bytes())
    flipped[100] ^= 1
    file.write_bytes(flipped)
    restarted = checkpointer_in(tmp_path, events, keep=2)
    assert restarted.latest().step == 1
    save(restarted, 3)
    assert names_in(tmp_path / "checkpoints") == ["step-00000001", "step-00000002", "step-00000003"]
    save(restarted, 4)
    assert names_in(tmp_path / "checkpoints") == ["step-00000003", "step-00000004"]


def test_a_truncated_one_does_not_count_as_kept_even_when_nobody_looked(tmp_path: Path, events: Events) -> None:
    checkpointer = checkpointer_in(tmp_path, events, keep=2)
    save(checkpointer, 1)
    save(checkpointer, 2)
    (tmp_path / "checkpoints/step-00000002/rank-00000.bin").write_bytes(b"short")
    save(checkpointer, 3)
    assert "step-00000001" in names_in(tmp_path / "checkpoints")


def test_a_step_saved_again_takes_the_place_of_the_old_one(tmp_path: Path, events: Events) -> None:
    checkpointer = checkpointer_in(tmp_path, events)
    checkpointer.save(5, whole(1), {"step": 1})
    checkpointer.save(5, whole(5), {"step": 5})
    checkpointer.close()
    assert names_in(tmp_path / "checkpoints") == ["step-00000005"]
    assert_holds(checkpointer.latest(), 5)


def test_a_save_after_a_rewind_removes_the_past_that_was_left(tmp_path: Path, events: Events) -> None:
    checkpointer = checkpointer_in(tmp_path, events)
    for step in (10, 20, 30):
        save(checkpointer, step)
    save(checkpointer, 15)
    assert names_in(tmp_path / "checkpoints") == ["step-00000010", "step-00000015"]
    assert checkpointer.latest().step == 15


def test_a_file_under_the_name_of_a_checkpoint_is_none_and_is_in_no_saves_way(tmp_path: Path, events: Events) -> None:
    """It was taken for a later step, whose deletion failed after each save."""
    checkpointer = checkpointer_in(tmp_path, events)
    stray = tmp_path / "checkpoints/step-00000099"
    stray.write_text("a note")
    save(checkpointer, 10)
    save(checkpointer, 20)
    assert checkpointer.latest().step == 20
    assert stray.read_text() == "a note"
    assert not events.of("checkpoint_failed") + events.of("checkpoint_not_removed")


def test_missing_names_are_named(tmp_path: Path, events: Events) -> None:
    checkpointer = checkpointer_in(tmp_path, events)
    save(checkpointer, 1)
    with pytest.raises(UserError, match=r"lacks 1 of the 13 tensors asked for: model\.other"):
        checkpointer.load(checkpointer.latest(), {**whole(1), "model.other": torch.zeros(1)})


def test_unused_names_are_an_error_unless_allowed(tmp_path: Path, events: Events) -> None:
    checkpointer = checkpointer_in(tmp_path, events)
    save(checkpointer, 1)
    found = checkpointer.latest()
    model = {name: tensor for name, tensor in blank(whole(1)).items() if name.startswith("model.")}
    with pytest.raises(UserError, match=r"holds 4 tensors that this run does not have: optim\.exp_avg\.embedding, "):
        checkpointer.load(found, model)
    checkpointer.load(found, model, allow_unused=True)
    assert_same(model, {name: whole(1)[name] for name in model})


def test_another_shape_is_refused_before_anything_is_changed(tmp_path: Path, events: Events) -> None:
    checkpointer = checkpointer_in(tmp_path, events)
    save(checkpointer, 1)
    tensors = {**blank(whole(1)), "model.six_rows": torch.zeros(5, 6)}
    with pytest.raises(UserError, match=r"model\.six_rows is \(6, 5\) there and \(5, 6\) here"):
        checkpointer.load(checkpointer.latest(), tensors)
    assert_same(tensors, {**blank(whole(1)), "model.six_rows": torch.zeros(5, 6)})


def test_another_dtype_is_converted_and_told(tmp_path: Path, events: Events) -> None:
    checkpointer = checkpointer_in(tmp_path, events)
    values = torch.randn(4, 4)
    checkpointer.save(1, {"model.weight": values}, {})
    tensors = {"model.weight": torch.zeros(4, 4, dtype=torch.bfloat16)}
    checkpointer.load(checkpointer.latest(), tensors)
    assert torch.equal(tensors["model.weight"], values.bfloat16())
    assert events.of("checkpoint_converted")[0]["names"] == ["model.weight"]


def test_parameters_that_require_gradients_are_saved_and_filled(tmp_path: Path, events: Events) -> None:
    checkpointer = checkpointer_in(tmp_path, events)
    layer, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    checkpointer.save(1, dict(layer.named_parameters()), {})
    checkpointer.load(checkpointer.latest(), dict(other.named_parameters()))
    assert torch.equal(layer.weight, other.weight)
    assert other.weight.requires_grad


def test_a_slice_costs_and_proves_only_its_own_blocks(tmp_path: Path, events: Events) -> None:
    rows = 3 * BLOCK // 4096
    values = torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)
    checkpointer = checkpointer_in(tmp_path, events)
    checkpointer.save(1, {"model.large": values}, {})
    found = checkpointer.latest()
    file = found.folder / "rank-00000.bin"
    with file.open("r+b") as opened:
        opened.seek(2 * BLOCK + 17)
        opened.write(b"?")
    reader = Reader(found.folder, found.manifest)
    metadata = reader.read_metadata()
    (place,) = metadata.storage_data.values()
    chunks, size = ChunkReader(found.folder), values.shape
    box = chunks.box(place, torch.float32, size, torch.Size([5000, 100]), torch.Size([1000, 7]))
    assert torch.equal(box, values[5000:6000, 100:107])
    with pytest.raises(DamageError, match=r"rank-00000.bin has checksum \w+ in the 16,777,216 bytes from 33,554,432"):
        chunks.box(place, torch.float32, size, torch.Size([rows - 1, 0]), torch.Size([1, 1]))


def test_reading_whole_tensors_by_name(tmp_path: Path, events: Events) -> None:
    save(checkpointer_in(tmp_path, events), 1)
    found = open_checkpoint(tmp_path)
    assert stored_names(found)["model.embedding"] == (torch.float32, torch.Size([13, 6]))
    assert [name for name, _ in read_full(found, ["model.three", "model.bf16"])] == ["model.three", "model.bf16"]
    with pytest.raises(UserError, match=r"lacks 1 of the 1 tensors asked for: model\.none"):
        read_full(found, ["model.none"])


def test_opening_what_is_not_there_says_what_is(tmp_path: Path, events: Events) -> None:
    with pytest.raises(UserError, match="has no checkpoint in checkpoints/: train first"):
        open_checkpoint(tmp_path)
    checkpointer = checkpointer_in(tmp_path, events)
    save(checkpointer, 1)
    save(checkpointer, 2)
    with pytest.raises(UserError, match="has no checkpoint of step 3; it has those of step 1, 2"):
        open_checkpoint(tmp_path, step=3)
