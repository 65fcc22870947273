"""Transfers between pipeline ranks: each ordered pair is a channel of its own, in order, and none waits for another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fivefold.config.run import Parallel
from fivefold.parallel.links import NO_LINKS, Channel, Links, rounds
from fivefold.parallel.mesh import mesh_of
from tests.ranks import Crew, kept

CPU = torch.device("cpu")


def links(tp: int = 1) -> Links:
    """Those of a layout without data parallelism; kept for the group's life."""
    if ("links", tp) not in kept:
        kept["links", tp] = mesh_of(Parallel(pp=dist.get_world_size() // tp, tp=tp), CPU).pp
    return kept["links", tp]


def message(source: int, target: int, number: int) -> torch.Tensor:
    """A tensor that no other transfer carries, of a length and a format that change with its number."""
    dtype = (torch.float32, torch.bfloat16, torch.float64)[number % 3]
    return torch.arange(number + 1).to(dtype) + 10 * source + 3 * target


def everyone_sends_before_anyone_receives(count: int) -> list[bool]:
    here = links()
    others = [rank for rank in range(here.size) if rank != here.rank]
    sent = [here.send(message(here.rank, rank, number), rank) for number in range(count) for rank in others]
    pending = {}
    for rank in reversed(others):
        for number in range(count):
            wanted = message(rank, here.rank, number)
            pending[rank, number] = here.receive(wanted.shape, wanted.dtype, CPU, rank)
    right = [torch.equal(each.wait(), message(rank, here.rank, n)) for (rank, n), each in reversed(pending.items())]
    for each in sent:
        each.wait()
    return [*right, all(each.done() for each in sent)]


@pytest.mark.parametrize("world", [2, 4])
def test_messages_of_a_channel_arrive_in_order_and_those_of_others_do_not_mix_in(world: int, ranks: Crew) -> None:
    for rights in ranks.run(world, everyone_sends_before_anyone_receives, 7):
        assert all(rights)
        assert len(rights) == 7 * (world - 1) + 1


def sends_a_transposed_and_an_empty_one() -> list[list[float]]:
    here = links()
    if here.rank == 0:
        for x in (torch.arange(6.0).view(2, 3).T, torch.empty(0, 4)):
            here.send(x, 1).wait()
        return []
    shapes = ((3, 2), (0, 4))
    return [here.receive(shape, torch.float32, CPU, 0).wait().flatten().tolist() for shape in shapes]


def test_the_order_of_elements_is_kept_and_an_empty_tensor_may_be_sent(ranks: Crew) -> None:
    assert ranks.run(2, sends_a_transposed_and_an_empty_one)[1] == [[0, 3, 1, 4, 2, 5], []]


def sends_along_pp() -> float:
    here = links(tp=2)
    if here.rank == 0:
        here.send(torch.tensor(float(dist.get_rank())), 1).wait()
        return -1.0
    return here.receive((), torch.float32, CPU, 0).wait().item()


def test_the_ranks_of_one_place_in_their_stages_are_linked(ranks: Crew) -> None:
    assert ranks.run(4, sends_along_pp) == [-1, -1, 0, 1]  # pp is outermost: ranks 0 and 2, 1 and 3


def test_each_direction_has_a_group_of_its_own_so_that_a_send_never_waits_behind_a_receive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = []
    monkeypatch.setattr(dist, "isend", lambda x, group, group_dst: used.append((group, 2, group_dst)))
    monkeypatch.setattr(dist, "irecv", lambda x, group, group_src: used.append((group, group_src, 2)))
    here = Links(2, 4, down="down", up="up")  # type: ignore[arg-type]
    for rank in (0, 1, 3):
        here.send(torch.zeros(1), rank)
        here.receive((1,), torch.float32, CPU, rank)
    assert all(group == ("down" if source < target else "up") for group, source, target in used)
    assert len(used) == 6


def warm_up_and_gather(channels: list[Channel]) -> list[str]:
    here = links()
    here.warm_up(channels, CPU)
    return here.gather(f"rank {here.rank}")


RING = [(0, 1), (1, 2), (2, 3), (3, 0), (1, 0), (2, 1), (3, 2), (0, 3)]


@pytest.mark.parametrize("channels", [RING, RING[:3], [(3, 0), (0, 3), (1, 3)], []])
def test_channels_are_warmed_up_by_those_who_use_them(channels: list[Channel], ranks: Crew) -> None:
    everyone = [f"rank {rank}" for rank in range(4)]
    assert ranks.run(4, warm_up_and_gather, channels) == [everyone] * 4


@pytest.mark.parametrize(
    ("channels", "expected"),
    [
        ([(r, r + 1) for r in range(15)], 2),
        ([(r, (r + 1) % 16) for r in range(16)] + [((r + 1) % 16, r) for r in range(16)], 2),
        ([(r, (r + 1) % 7) for r in range(7)], 3),
        ([(r, r + 1) for r in range(7)] + [(7, 0), (0, 7)], 2),
        ([(1, 0)], 1),
        ([], 0),
    ],
)
def test_pairs_meet_in_few_rounds(channels: list[Channel], expected: int) -> None:
    found = rounds(channels)
    assert len(found) == expected
    assert sorted(pair for pairs in found for pair in pairs) == sorted({(min(c), max(c)) for c in channels})
    for pairs in found:
        met = [rank for pair in pairs for rank in pair]
        assert len(met) == len(set(met)), "a rank has one partner a round"


def test_without_a_pipeline_there_is_nobody_to_talk_to() -> None:
    NO_LINKS.warm_up([], CPU)
    assert NO_LINKS.gather("me") == ["me"]
