"""What travels when experts are spread over ranks: each token once to each rank, and once to each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.config.run import Parallel
from fivefold.kernels.expert_feed_forward import Rows
from fivefold.kernels.routing import Sorted, sort_by_expert, without_dropped
from fivefold.parallel.axis import Axis, Pending
from fivefold.parallel.expert import through_experts
from fivefold.parallel.mesh import mesh_of
from tests.ranks import Crew, kept

TOKENS, EXPERTS, K, WIDTH = 9, 8, 3, 4


@dataclass(frozen=True)
class Counting(Axis):
    """An axis that remembers how many rows of tokens it sent to each rank, of those of this width."""

    sent: list[list[int]] = field(default_factory=list, compare=False)

    def start_all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Pending:
        if x.dtype == torch.float64 and x.ndim == 2:
            self.sent.append(list(send))
        return super().start_all_to_all(x, send, receive)


def legs_of(near: int) -> tuple[Counting, ...]:
    """Those of all ranks, in nodes of `near`."""
    world = dist.get_world_size()
    if ("legs", near) not in kept:
        mesh = mesh_of(Parallel(ep=world, dp=world), torch.device("cpu"), near)
        kept["legs", near] = mesh.ep_by_node if near < world else (mesh.ep,)
    return tuple(Counting(leg.size, leg.rank, leg.group) for leg in kept["legs", near])


def chosen(rank: int, dropping: bool) -> tuple[Tensor, Sorted]:
    """The experts of a rank's tokens, EXPERTS for a choice that is dropped; and the same sorted."""
    generator = torch.Generator().manual_seed(rank)
    experts_tk = torch.rand(TOKENS, EXPERTS, generator=generator).topk(K).indices
    choices = sort_by_expert(experts_tk, EXPERTS)
    if not dropping:
        return experts_tk, choices
    kept_tk = torch.rand(TOKENS, K, generator=generator) < 0.5
    return experts_tk.masked_fill(~kept_tk, EXPERTS), without_dropped(choices, kept_tk)


def travel(near: int, dropping: bool) -> tuple[list[list[list[int]]], float, float]:
    """What each leg sent of tokens, in forward and backward; the largest error of the output and of any gradient."""
    rank, world, legs = dist.get_rank(), dist.get_world_size(), legs_of(near)
    experts_tk, choices = chosen(rank, dropping)
    generator = torch.Generator().manual_seed(100 + rank)
    x_td = torch.rand(TOKENS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    gates_tk = torch.rand(TOKENS, K, dtype=torch.float64, generator=generator).requires_grad_()
    mine = EXPERTS // world

    def compute(x_nd: Tensor, gates_r: Tensor, rows: Rows) -> Tensor:
        expert_r = torch.searchsorted(rows.ends_e.long(), torch.arange(len(gates_r)), right=True) + rank * mine
        return torch.sin(x_nd[rows.index_r] * (1 + expert_r[:, None])) * gates_r[:, None]

    out_td = through_experts(x_td, gates_tk, choices, legs, compute)
    factor_tk = (1 + experts_tk)[..., None]
    alone_tkd = torch.sin(x_td[:, None] * factor_tk) * gates_tk[..., None] * (experts_tk < EXPERTS)[..., None]
    error = (out_td - alone_tkd.sum(1)).abs().max().item()
    d_out_td = torch.rand(TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    found = torch.autograd.grad(out_td, (x_td, gates_tk), d_out_td)
    right = torch.autograd.grad(alone_tkd.sum(1), (x_td, gates_tk), d_out_td)
    of_gradient = max((a - b).abs().max().item() for a, b in zip(found, right, strict=True))
    return [leg.sent for leg in legs], error, of_gradient


def visitors(experts_tk: Tensor, ranks: int) -> list[set[int]]:
    """The tokens with an expert of each rank, if all experts are shared out among so many."""
    owner_tk = experts_tk // (EXPERTS // ranks)
    return [{t for t in range(TOKENS) if rank in owner_tk[t].tolist()} for rank in range(ranks)]


@pytest.mark.parametrize("dropping", [False, True])
@pytest.mark.parametrize(("world", "near"), [(2, 2), (4, 4), (4, 2)])
def test_a_token_goes_to_each_rank_once(world: int, near: int, dropping: bool, ranks: Crew) -> None:
    outcomes = ranks.run(world, travel, near, dropping)
    told = [visitors(chosen(rank, dropping)[0], world) for rank in range(world)]
    for rank, (sent, error, of_gradient) in enumerate(outcomes):
        assert max(error, of_gradient) < 1e-12
        there = [len(tokens) for tokens in told[rank]]
        back = [len(told[source][rank]) for source in range(world)]
        if near != 2 or world == 2:
            assert sent == [[there, back, there, back]]
            continue
        node, place = divmod(rank, near)
        to_nodes = [len(tokens) for tokens in visitors(chosen(rank, dropping)[0], world // near)]
        peers = [peer * near + place for peer in range(world // near)]
        of_nodes = [len(visitors(chosen(peer, dropping)[0], world // near)[node]) for peer in peers]
        inside = [sum(len(told[peer][node * near + other]) for peer in peers) for other in range(near)]
        others = [[peer // near * near + other for peer in peers] for other in range(near)]
        of_inside = [sum(len(told[peer][rank]) for peer in each) for each in others]
        assert sent == [[to_nodes, of_nodes, to_nodes, of_nodes], [inside, of_inside, inside, of_inside]]


def near(of_last: int) -> int:
    mesh = mesh_of(Parallel(ep=4, dp=4), torch.device("cpu"))
    return replace(mesh, near=of_last if mesh.rank == 3 else 2).ep_near


def test_where_ranks_know_different_nodes_all_count_as_near(ranks: Crew) -> None:
    assert ranks.run(4, near, 2) == [2] * 4
    assert ranks.run(4, near, 1) == [4] * 4
