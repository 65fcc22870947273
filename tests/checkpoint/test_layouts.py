"""A checkpoint belongs to no layout: what one set of ranks saved, any other loads, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.checkpoint.find import open_checkpoint
from fivefold.checkpoint.storage import Reader
from tests.checkpoint.crew import Crew, Team
from tests.checkpoint.example import LAYOUTS, Events, assert_holds, assert_same, blank, ranks_of, sharded, whole


def save(team: Team, run: Path, layout: str, step: int) -> list[str]:
    events = Events()
    checkpointer = Checkpointer(run / "checkpoints", keep=9, on_event=events, group=team.group)
    checkpointer.save(step, sharded(team, layout, step), {"step": step})
    checkpointer.close()
    return [kind for kind, _ in events]


def load_and_compare(team: Team, run: Path, layout: str, step: int) -> None:
    checkpointer = Checkpointer(run / "checkpoints", keep=9, on_event=Events(), group=team.group)
    wanted = sharded(team, layout, step)
    tensors = blank(wanted)
    found = checkpointer.latest()
    assert found.step == step
    assert checkpointer.load(found, tensors) == {"step": step}
    assert_same(tensors, wanted)


def load_and_save_again(team: Team, run: Path, layout: str, to: Path) -> None:
    checkpointer = Checkpointer(run / "checkpoints", keep=9, on_event=Events(), group=team.group)
    tensors = blank(sharded(team, layout, 0))
    found = checkpointer.latest()
    state = checkpointer.load(found, tensors)
    again = Checkpointer(to / "checkpoints", keep=9, on_event=Events(), group=team.group)
    again.save(found.step, tensors, state)
    again.close()


@pytest.mark.parametrize("saved", LAYOUTS)
def test_every_layout_loads_what_this_one_saved(crew: Crew, tmp_path: Path, saved: str) -> None:
    events = crew.run(save, tmp_path, saved, 7, ranks=ranks_of(saved))
    assert events == [["checkpoint_saved"]] + [[]] * (ranks_of(saved) - 1), "the first rank alone reports"
    assert_holds(open_checkpoint(tmp_path), 7)
    for layout in LAYOUTS:
        crew.run(load_and_compare, tmp_path, layout, 7, ranks=ranks_of(layout))


def test_a_chain_of_layouts_and_back_is_the_identity(crew: Crew, tmp_path: Path) -> None:
    chain = ["dp4", "dp3", "dp1", "replicate2 x dp2", "dp4"]
    crew.run(save, tmp_path / "0", chain[0], 5, ranks=4)
    for number, layout in enumerate(chain[1:]):
        crew.run(
            load_and_save_again, tmp_path / str(number), layout, tmp_path / str(number + 1), ranks=ranks_of(layout)
        )
        assert_holds(open_checkpoint(tmp_path / str(number + 1)), 5)
    first, last = (open_checkpoint(tmp_path / number).manifest.files for number in ("0", str(len(chain) - 1)))
    assert first == last, "the same layout writes the same bytes"


def test_one_process_without_torch_distributed_loads_what_four_ranks_saved(crew: Crew, tmp_path: Path) -> None:
    crew.run(save, tmp_path, "dp4", 3)
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=1, on_event=Events())
    tensors = blank(whole(3))
    assert checkpointer.load(checkpointer.latest(), tensors) == {"step": 3}
    assert_same(tensors, whole(3))


def test_and_the_other_way_round(crew: Crew, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "checkpoints", keep=1, on_event=Events())
    checkpointer.save(4, whole(4), {"step": 4})
    checkpointer.close()
    crew.run(load_and_compare, tmp_path, "dp4", 4)


def stages_save_and_load(team: Team, run: Path) -> None:
    """Each rank has tensors of its own names, as pipeline stages do."""
    checkpointer = Checkpointer(run / "checkpoints", keep=1, on_event=Events(), group=team.group)
    mine = {f"model.stage{team.rank}.weight": torch.full((3,), float(team.rank)), "model.shared": torch.ones(2)}
    checkpointer.save(1, mine, {})
    tensors = blank(mine)
    checkpointer.load(checkpointer.latest(), tensors)
    assert_same(tensors, mine)


def test_ranks_may_hold_different_names(crew: Crew, tmp_path: Path) -> None:
    crew.run(stages_save_and_load, tmp_path)


def copies_after_second_save(team: Team, run: Path) -> tuple[set[str], set[str], bool]:
    checkpointer = Checkpointer(run / "checkpoints", keep=1, on_event=Events(), group=team.group)
    tensors = {f"model.{n}": torch.full((4,), float(n)) for n in range(6)}
    copied, addresses = [], []
    for step in (1, 2, 3):
        checkpointer.save(step, tensors, {})
        checkpointer.wait()
        copied.append(set(checkpointer._snapshot.copies))
        addresses.append({name: copy.data_ptr() for name, copy in checkpointer._snapshot.copies.items()})
    return copied[0], copied[1], addresses[1] == addresses[2]


def test_replicas_share_the_work_and_reuse_their_buffers(crew: Crew, tmp_path: Path) -> None:
    results = crew.run(copies_after_second_save, tmp_path, ranks=3)
    assert all(len(first) == 6 for first, _, _ in results), "the first save copies all, the plan is not known yet"
    assert sorted(name for _, second, _ in results for name in second) == [f"model.{n}" for n in range(6)]
    assert all(len(second) == 2 for _, second, _ in results), "each of three ranks writes a third"
    assert all(reused for _, _, reused in results)


def load_with_plain_dcp(team: Team, run: Path) -> None:
    found = open_checkpoint(run)
    tensors = blank(sharded(team, "dp3", 2))
    dcp.load(tensors, storage_reader=Reader(found.folder, found.manifest), process_group=team.group)
    loaded = {name: tensors[name] for name in tensors}
    assert_same(loaded, sharded(team, "dp3", 2))


def test_torch_distributed_checkpoint_reads_it_through_our_reader(crew: Crew, tmp_path: Path) -> None:
    crew.run(save, tmp_path, "dp4", 2)
    crew.run(load_with_plain_dcp, tmp_path, ranks=3)
