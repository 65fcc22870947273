"""What balances experts, against its formulas in plain torch: losses with their gradients, biases, the load of a step.

That each layout equals one process (`tests/parity`) says nothing of a definition that is wrong in both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.config.run import Batch, Data, Experts, Loss, Model, Routing, Run, Source
from fivefold.kernels import expert_feed_forward as feed_forward
from fivefold.model.activations import Policy
from fivefold.model.attention import Context
from fivefold.model.moe import MoE, Router
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

SHARED = Context((MICRO, LENGTH), None, None)  # type: ignore[arg-type]


class Waits(TorchDispatchMode):
    """Notes the operations for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index.Tensor:
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        else:
            waits = bool({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags))
        if waits:
            self.noted.append(str(func))
        return func(*args, **(kwargs or {}))


def a_run(scores: str, loss: Loss, rate: float = 0.1, capacity_factor: float | None = None) -> Run:
    """With `SEQUENCES` sequences a step."""
    moe = Experts(experts=EXPERTS, top_k=TOP_K, ffn=1, scores=scores, bias=True, normalize=False)  # type: ignore[arg-type]
    return Run(
        name="a",
        steps=1,
        model=Model(layers=1, hidden=WIDTH, heads=1, ffn=1, vocab=2, moe=moe),
        data=Data(train=[Source(path=Path("none"))], seq_len=LENGTH),
        batch=Batch(global_size=SEQUENCES, micro_size=MICRO),
        loss=loss,
        routing=Routing(bias_rate=rate, capacity_factor=capacity_factor),
    )


def a_router(run: Run) -> Router:
    """One whose experts are chosen unevenly."""
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
    router = a_router(a_run(scores, loss))
    x_expected, weight = x.clone().requires_grad_(), router.weight.detach().clone().requires_grad_()
    gates, *expected = by_formula(x_expected, weight, scores, loss)
    ((gates * worth).sum() + sum(expected)).backward()

    x.requires_grad_()
    found = torch.zeros(2, dtype=torch.float64)
    for rows in (slice(0, MICRO), slice(MICRO, SEQUENCES)):
        gates_tk, choices, routed = router(x[rows].flatten(0, 1), SHARED)
        expert_of_row = torch.bucketize(choices.places_tk, choices.ends_e, right=True)
        (gates_tk * worth[rows].flatten(0, 1).gather(1, expert_of_row)).sum().backward()
        found += torch.stack([routed.balance_loss, routed.z_loss])
    torch.testing.assert_close(found, torch.stack(expected).detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(x.grad, x_expected.grad, rtol=1e-12, atol=1e-14)


def test_an_expert_with_more_than_the_mean_becomes_less_likely_and_the_shares_are_remembered() -> None:
    router = a_router(a_run("sigmoid", Loss(), rate=0.1))
    counts = torch.tensor([6, 2, 4, 4], dtype=torch.float64)
    router.update(counts, torch.tensor(True))
    change = torch.tensor([-0.1, 0.1, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(router.bias, BIAS + change)
    assert torch.equal(router.load, torch.tensor([6, 2, 4, 4], dtype=torch.float64) / 16)


def test_a_step_that_is_not_applied_changes_neither() -> None:
    router = a_router(a_run("sigmoid", Loss()))
    router.update(torch.tensor([6, 2, 4, 4], dtype=torch.float64), torch.tensor(False))
    assert torch.equal(router.bias, BIAS)  # type: ignore[arg-type]
    assert torch.equal(router.load, LOAD)


@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_the_host_waits_for_no_router_whether_it_drops_or_not(capacity_factor: float | None) -> None:
    """With a capacity it waited to know how many choices are dropped."""
    router = a_router(a_run("sigmoid", LOSSES["all"], capacity_factor=capacity_factor))
    x_td = torch.randn(MICRO * LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with Waits() as waits:
        gates_tk, _, routed = router(x_td, SHARED)
        gates_tk.sum().backward()
    assert waits.noted == []
    assert bool(routed.dropped) == (capacity_factor is not None)
    with Waits() as waits:
        x_td[x_td[:, 0] > 0].sum().item()
    assert len(waits.noted) == 2


def test_what_a_product_leaves_in_dropped_rows_reaches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it is what was in that memory before."""
    run = a_run("softmax", LOSSES["all"], capacity_factor=0.5)
    part = Part(objective=Objective.of(run))
    generator = torch.Generator().manual_seed(0)
    x_td = torch.randn(MICRO * LENGTH, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    moe = MoE(run.model, 0, part, Policy(None, first=False)).double()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    touched = []

    def undefined(right: Any) -> Any:
        def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
            out = right(rows, weight, ends)
            touched.append(len(rows) - int(ends[-1]))
            out[int(ends[-1]) :] = torch.nan
            return out

        return product

    for name in ("grouped_multiply", "grouped_multiply_transposed"):
        monkeypatch.setattr(feed_forward, name, undefined(getattr(feed_forward, name)))
    out_td, routed = moe(x_td, SHARED)
    (out_td * out_td.detach()).sum().backward()
    assert touched == [int(routed.dropped)] * 4
    assert routed.dropped > 0
    for found in (out_td, x_td.grad, *(parameter.grad for parameter in moe.parameters())):
        assert found.isfinite().all()
