"""Where tokens go whose experts are spread over ranks, and how their choices lie where they arrive."""

import pytest
import torch

from fivefold.kernels.routing import sort_by_expert, without_dropped
from fivefold.kernels.visits import (
    Arrival,
    arrived,
    reference_arrived,
    reference_visits,
    visitors,
    visits,
    visits_before,
)

GPU = pytest.mark.gpu


def test_a_token_visits_each_rank_of_its_experts_once():
    experts_tk = torch.tensor([[0, 1], [3, 0], [2, 3], [1, 0]])  # two ranks of two experts
    choices = sort_by_expert(experts_tk, experts=4)
    gates_r = torch.arange(8.0)
    sent = visits(choices, gates_r, ranks=2)

    # rows by expert: (0, 0) (1, 1) (3, 1) | (0, 1) (3, 0) | (2, 0) | (1, 0) (2, 1)
    assert choices.order_r.tolist() == [0, 3, 7, 1, 6, 4, 2, 5]
    assert sent.sources[:5].tolist() == [0, 1, 3, 2, 1]
    assert sent.places_tk.tolist() == [[0, -1], [4, 1], [3, -1], [-1, 2]]
    # to rank 0 visitors 0, 1, 2 are tokens 0, 1, 3; to rank 1 visitors 0, 1 are tokens 2, 1; times k plus the place
    assert sent.messages_r[:, 1].tolist() == [0, 3, 5, 1, 4, 0, 2, 1]
    assert sent.messages_r[:, 0].view(torch.float32).tolist() == gates_r.tolist()
    assert visitors(choices, sent.before, 2).tolist() == [3, 2]
    assert visitors(choices, visits_before(choices, 4), 4).tolist() == [3, 2, 1, 2]


def test_a_dropped_choice_visits_nobody():
    experts_tk = torch.tensor([[0, 1], [3, 0], [2, 3]])
    kept_tk = torch.tensor([[False, True], [True, False], [False, False]])
    choices = without_dropped(sort_by_expert(experts_tk, experts=4), kept_tk)
    sent = visits(choices, torch.ones(6), ranks=2)
    assert visitors(choices, sent.before, 2).tolist() == [1, 1]
    assert sent.sources[:2].tolist() == [0, 1]
    assert sent.places_tk.tolist() == [[-1, 0], [1, -1], [-1, -1]]
    assert sent.messages_r[:2, 1].tolist() == [1, 0]


def test_what_arrives_is_sorted_by_expert_and_then_by_rank():
    # of rank 0 two tokens with choices of experts 0, 0, 1; of rank 1 one token with a choice of each
    arrival = Arrival.of(torch.tensor([2, 1]), torch.tensor([[2, 1], [1, 1]]))
    gates = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    numbers = torch.tensor([0, 2, 1, 0, 1], dtype=torch.int32)
    found = arrived(torch.stack([gates.view(torch.int32), numbers], 1), torch.float32, arrival, m=3, k=2)
    torch.testing.assert_close(found.gates_n, torch.tensor([0.1, 0.2, 0.4, 0.3, 0.5]), rtol=0, atol=0)
    assert found.order_n.tolist() == [0, 2, 4, 1, 5]
    assert found.index_n.tolist() == [0, 1, 2, 0, 2]
    assert found.places_mk.tolist() == [[0, 3], [1, -1], [2, 4]]
    assert found.inverse_n.tolist() == [0, 1, 3, 2, 4]
    assert arrival.ends_e.tolist() == [3, 5]
    assert arrival.ends_e.dtype == torch.int32


CASES = [  # tokens, experts, choices, ranks
    (1, 2, 1, 2),
    (50, 8, 3, 2),
    (700, 128, 8, 8),
    (900, 12, 5, 3),
    (300, 256, 8, 64),
    (0, 8, 2, 4),
]


@GPU
@pytest.mark.parametrize(("tokens", "experts", "k", "ranks"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dropping", [False, True])
def test_kernels_give_what_the_reference_gives(tokens, experts, k, ranks, dtype, dropping):
    generator = torch.Generator().manual_seed(tokens + ranks)
    experts_tk = torch.rand(tokens, experts, generator=generator).topk(k).indices
    choices = sort_by_expert(experts_tk, experts)
    if dropping:
        choices = without_dropped(choices, torch.rand(tokens, k, generator=generator) < 0.6)
    gates_r = torch.rand(tokens * k, dtype=dtype, generator=generator)
    right = reference_visits(choices, gates_r, ranks)
    on_gpu = type(choices)(*(each.cuda() for each in choices))
    found = visits(on_gpu, gates_r.cuda(), ranks)
    kept, sent = int(choices.ends_e[-1]), len(right.sources)
    assert torch.equal(found.before.cpu(), right.before)
    assert torch.equal(visitors(on_gpu, found.before, ranks).cpu(), visitors(choices, right.before, ranks))
    assert torch.equal(found.sources[:sent].cpu(), right.sources)
    assert torch.equal(found.places_tk.cpu(), right.places_tk)
    assert torch.equal(found.messages_r[:kept].cpu(), right.messages_r[:kept])


@GPU
@pytest.mark.parametrize(("tokens", "experts", "k", "ranks"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_arrives_is_sorted_as_the_reference_sorts_it(tokens, experts, k, ranks, dtype):
    mine, generator = experts // ranks, torch.Generator().manual_seed(tokens + ranks)
    messages, counts, visitors_p = [], [], []
    for _ in range(ranks):  # what each rank sends to the first
        choices = sort_by_expert(torch.rand(tokens, experts, generator=generator).topk(k).indices, experts)
        sent = reference_visits(choices, torch.rand(tokens * k, dtype=dtype, generator=generator), ranks)
        messages.append(sent.messages_r[: choices.ends_e[mine - 1]])
        counts.append(choices.ends_e[:mine].long().diff(prepend=torch.zeros(1, dtype=torch.long)))
        visitors_p.append(visitors(choices, sent.before, ranks)[0])
    arrival, m = Arrival.of(torch.stack(visitors_p), torch.stack(counts)), int(sum(visitors_p))
    right = reference_arrived(torch.cat(messages), dtype, arrival, m, k)
    found = arrived(torch.cat(messages).cuda(), dtype, Arrival(*(each.cuda() for each in arrival)), m, k)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, right, strict=True))
