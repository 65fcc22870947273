"""What balances experts, against its formulas in plain torch: losses with their gradients, biases, the load of a step.

That each layout equals one process (`tests/parity`) says nothing of a definition that is wrong in both.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fivefold.config.run import Batch, Data, Experts, Loss, Model, Routing, Run, Source
from fivefold.model.attention import Context
from fivefold.model.moe import Router
from fivefold.model.objective import Objective
from fivefold.model.part import Part

SEQUENCES, LENGTH, MICRO, WIDTH = 4, 6, 2, 5
EXPERTS, TOP_K = 4, 2
LOAD = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
BIAS = torch.tensor([0.2, -0.3, 0.05, 0.0], dtype=torch.float64)
LOSSES = {
    "sequence": Loss(balance_sequence=0.7),
    "global": Loss(balance_global=0.9),
    "z": Loss(router_z=0.3),
    "all": Loss(balance_sequence=0.7, balance_global=0.9, router_z=0.3),
}


def a_router(scores: str, loss: Loss, rate: float = 0.1) -> Router:
    """One whose experts are chosen unevenly, in a run of `SEQUENCES` sequences a step."""
    moe = Experts(experts=EXPERTS, top_k=TOP_K, ffn=1, scores=scores, bias=True, normalize=False)  # type: ignore[arg-type]
    run = Run(
        name="a",
        steps=1,
        model=Model(layers=1, hidden=WIDTH, heads=1, ffn=1, vocab=2, moe=moe),
        data=Data(train=[Source(path=Path("none"))], seq_len=LENGTH),
        batch=Batch(global_size=SEQUENCES, micro_size=MICRO),
        loss=loss,
        routing=Routing(bias_rate=rate),
    )
    router = Router(run.model, Part(objective=Objective.of(run))).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(EXPERTS, WIDTH, generator=generator, dtype=torch.float64))
        router.load.copy_(LOAD)
        assert router.bias is not None
        router.bias.copy_(BIAS)
    return router


def by_formula(x_bsd: Tensor, weight: Tensor, scores: str, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Gates of all experts, 0 where not chosen (b, s, E), and the balance losses and the z-loss of a whole step."""
    logits = torch.einsum("bsd,ed->bse", x_bsd, weight)
    scored = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    probability = scored / scored.sum(-1, keepdim=True)
    best = (scored + BIAS).detach().sort(dim=-1, descending=True).indices[..., :TOP_K]
    chosen = (best[..., None] == torch.arange(EXPERTS)).sum(-2).double()
    balance = torch.zeros((), dtype=torch.float64)
    for sequence in range(SEQUENCES):
        share = chosen[sequence].sum(0) / (LENGTH * TOP_K)
        of_sequence = EXPERTS * (share * probability[sequence].mean(0)).sum()
        balance = balance + loss.balance_sequence * of_sequence / SEQUENCES
    balance = balance + loss.balance_global * EXPERTS * (LOAD * probability.flatten(0, 1).mean(0)).sum()
    z = loss.router_z * (logits.exp().sum(-1).log() ** 2).mean()
    return scored * chosen, balance, z


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_and_gradients_are_those_of_the_formulas(scores: str, loss: Loss) -> None:
    """In two microbatches, whose parts add up. Each was once made wrong without another test that saw it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SEQUENCES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    worth = torch.randn(SEQUENCES, LENGTH, EXPERTS, generator=generator, dtype=torch.float64)
    router = a_router(scores, loss)
    x_expected, weight = x.clone().requires_grad_(), router.weight.detach().clone().requires_grad_()
    gates, *expected = by_formula(x_expected, weight, scores, loss)
    ((gates * worth).sum() + sum(expected)).backward()

    x.requires_grad_()
    found = torch.zeros(2, dtype=torch.float64)
    for rows in (slice(0, MICRO), slice(MICRO, SEQUENCES)):
        shared = Context((MICRO, LENGTH), None, None)  # type: ignore[arg-type]
        gates_tk, choices, routed = router(x[rows].flatten(0, 1), shared)
        expert_of_row = torch.bucketize(choices.places_tk, choices.ends_e, right=True)
        (gates_tk * worth[rows].flatten(0, 1).gather(1, expert_of_row)).sum().backward()
        found += torch.stack([routed.balance_loss, routed.z_loss])
    torch.testing.assert_close(found, torch.stack(expected).detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(x.grad, x_expected.grad, rtol=1e-12, atol=1e-14)


def test_an_expert_with_more_than_the_mean_becomes_less_likely_and_the_shares_are_remembered() -> None:
    router = a_router("sigmoid", Loss(), rate=0.1)
    counts = torch.tensor([6, 2, 4, 4], dtype=torch.float64)
    router.update(counts, torch.tensor(True))
    change = torch.tensor([-0.1, 0.1, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(router.bias, BIAS + change)
    assert torch.equal(router.load, torch.tensor([6, 2, 4, 4], dtype=torch.float64) / 16)


def test_a_step_that_is_not_applied_changes_neither() -> None:
    router = a_router("sigmoid", Loss())
    router.update(torch.tensor([6, 2, 4, 4], dtype=torch.float64), torch.tensor(False))
    assert torch.equal(router.bias, BIAS)  # type: ignore[arg-type]
    assert torch.equal(router.load, LOAD)
