"""Multi-token prediction against the formula in float64: documents one by one, sequences that end where labels do."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.config.run import Model
from fivefold.data.loader import IGNORE, Loader, sample_order
from fivefold.model.attention import context
from fivefold.model.init import initialize
from fivefold.model.layers import RMSNorm
from fivefold.model.ledger import Ledger
from fivefold.model.mtp import Depth, inputs_ahead
from fivefold.model.objective import Objective
from fivefold.model.part import Part
from fivefold.model.spec import parameter_shapes
from fivefold.model.transformer import Transformer
from tests.data.test_loader import SEQ, corpus

WEIGHT = 0.7
MODEL = Model(layers=2, hidden=24, heads=4, kv_heads=2, head_dim=6, ffn=20, vocab=37, context=32, init_std=0.3)
BLOOM = {"norm": "layernorm", "activation": "gelu", "bias": True, "position": "alibi", "kv_heads": "auto"}
MODELS = {
    "one depth": {"mtp": 1},
    "two depths, tied": {"mtp": 2, "tied": True},
    "three depths, bloom": {"mtp": 3, "embedding_norm": True, **BLOOM},
}
models = pytest.mark.parametrize("model", [MODEL.model_copy(update=each) for each in MODELS.values()], ids=MODELS)
LENGTHS = [[5, 1, 2, 1, 4], [13], [3, 10], [1, 12]]
"""Tokens of each document of each row, the last target included."""


class Rows(NamedTuple):
    """A microbatch as the loader makes it."""

    tokens: Tensor
    labels: Tensor
    documents: Tensor
    packed: bool


def rows_of(lengths: list[list[int]]) -> tuple[Rows, list[Tensor]]:
    """Rows of documents of these lengths, and the documents."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(0, 37, (len(lengths), sum(lengths[0])), generator=generator)
    numbers = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    labels = whole[:, 1:].masked_fill(numbers[:, 1:] != numbers[:, :-1], IGNORE)
    cut = [document for row, sizes in zip(whole, lengths, strict=True) for document in row.split(sizes)]
    packed = any(len(row) > 1 for row in lengths)
    return Rows(whole[:, :-1], labels, numbers[:, :-1].int(), packed), cut


def build(model: Model) -> Transformer:
    """With random norms and biases, since ones and zeros hide faults."""
    transformer = Transformer(model, Part(objective=Objective(mtp=WEIGHT))).double()
    initialize(dict(transformer.named_parameters()), model, seed=0)
    for parameter in transformer.parameters():
        if parameter.ndim == 1:
            parameter.data += torch.rand(parameter.shape, generator=torch.Generator().manual_seed(2))
    return transformer


def ledger_of(model: Model, documents: list[Tensor]) -> Ledger:
    counts = [sum(max(0, len(each) - 1 - depth) for each in documents) for depth in range(model.mtp + 1)]
    return Ledger(model, counts[0], counts[1:], torch.device("cpu"))


def normed(x_td: Tensor, norm: torch.nn.Module, eps: float) -> Tensor:
    if isinstance(norm, RMSNorm):
        return x_td * (x_td.square().mean(-1, keepdim=True) + eps).rsqrt() * norm.weight
    return F.layer_norm(x_td, x_td.shape[-1:], norm.weight, norm.bias, eps)


def losses_written_out(model: Model, transformer: Transformer, document: Tensor) -> list[Tensor]:
    """The sums of the losses of a document, of the next token and of each depth; each depth's sequence is shorter."""
    weight = transformer.embedding.weight
    head = weight if model.tied else transformer.head.weight

    def loss(state: Tensor, ahead: int) -> Tensor:
        return F.cross_entropy(state @ head.T, document[ahead:], reduction="sum")

    def blocks(x_td: Tensor, *modules: torch.nn.Module) -> Tensor:
        places = torch.arange(len(x_td))
        shared = context(model, Part(), x_td, places, None, torch.Size((1, len(x_td))))
        for module in modules:
            x_td = module(x_td, shared)
        return x_td

    if len(document) < 2:
        return [torch.zeros(())] * (model.mtp + 1)
    x_td = transformer.embedding_norm(weight[document[:-1]])
    state = normed(blocks(x_td, *transformer.layers.values()), transformer.norm, model.norm_eps)
    losses = [loss(state, 1)]
    for depth, module in enumerate(transformer.mtp.values(), start=1):
        if len(document) <= depth + 1:
            return losses + [torch.zeros(())] * (model.mtp + 1 - len(losses))
        given, known = weight[document[depth:-1]], state[:-1]
        halves = normed(given, module.embedding_norm, model.norm_eps), normed(known, module.hidden_norm, model.norm_eps)
        width = model.hidden
        x_td = halves[0] @ module.project.weight[:, :width].T + halves[1] @ module.project.weight[:, width:].T
        state = normed(blocks(x_td, module.block), module.norm, model.norm_eps)
        losses.append(loss(state, depth + 1))
    return losses


@models
@pytest.mark.parametrize("lengths", [LENGTHS, [[13], [13]]], ids=["packed", "one document a row"])
def test_losses_and_gradients_are_those_of_the_formula(model: Model, lengths: list[list[int]]) -> None:
    rows, documents = rows_of(lengths)
    transformer = build(model)
    by_document = [losses_written_out(model, transformer, document) for document in documents]
    expected = [torch.stack(each).sum() for each in zip(*by_document, strict=True)]
    counts = [sum(max(0, len(d) - 1 - depth) for d in documents) for depth in range(model.mtp + 1)]
    means = [loss / count for loss, count in zip(expected, counts, strict=True)]
    (means[0] + WEIGHT / model.mtp * torch.stack(means[1:]).sum()).backward()
    wanted = {name: parameter.grad for name, parameter in transformer.named_parameters()}
    transformer.zero_grad()

    ledger = ledger_of(model, documents)
    loss = transformer(*rows, ledger=ledger)
    (loss / ledger.divisor).backward()
    torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(ledger.totals(ledger.vector()).mtp_losses, torch.stack(means[1:]), rtol=1e-12, atol=0)
    for name, parameter in transformer.named_parameters():
        torch.testing.assert_close(
            parameter.grad, wanted[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


@models
def test_parameters_are_those_that_the_spec_counts(model: Model) -> None:
    found = {name: tuple(parameter.shape) for name, parameter in Transformer(model).named_parameters()}
    assert list(found.items()) == list(parameter_shapes(model).items())


def test_it_runs_in_training_alone_and_what_is_returned_is_the_loss_of_the_next_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = MODEL.model_copy(update={"mtp": 2})
    rows, documents = rows_of(LENGTHS)
    transformer = build(model)
    trained = transformer(*rows, ledger=ledger_of(model, documents))
    monkeypatch.setattr(Depth, "forward", lambda *_: pytest.fail("nobody wants further tokens"))
    validated = transformer(*rows)
    assert torch.equal(trained, validated)
    assert transformer(rows.tokens).shape == (4, 12, 37)


def test_what_is_given_and_asked_at_each_depth() -> None:
    rows, no = rows_of([[3, 1, 2, 4]])[0], IGNORE
    place = torch.arange(9)[None]
    labels = torch.tensor([[1, 2, no, no, 5, no, 7, 8, 9]])
    expected = {
        1: [2, no, no, no, no, no, 8, 9, no],
        2: [no, no, no, no, no, no, 9, no, no],
        3: [no] * 9,
        8: [no] * 9,
    }
    for depth, wanted in expected.items():
        given, asked = inputs_ahead(place, labels, rows.documents, torch.arange(9), depth)
        assert asked.tolist() == wanted
        assert given.tolist()[: 9 - depth] == list(range(depth, 9))
    given, asked = inputs_ahead(place, labels, rows.documents, torch.tensor([0, 1, 6, 7]), 1)  # those of a rank of cp
    assert (given.tolist(), asked.tolist()) == ([1, 2, 7, 8], [2, no, 8, 9])
    asked = inputs_ahead(place, place + 1, None, torch.arange(9), 2)[1]
    assert asked.tolist() == [3, 4, 5, 6, 7, 8, 9, no, no]


@pytest.mark.parametrize("document_mask", [True, False])
def test_the_labels_that_the_loader_counts_are_those_that_the_model_finds(document_mask: bool) -> None:
    sources = corpus()
    order = sample_order(sources, [1.0, 2.0], SEQ, seed=3)
    sizes = {"seq_len": SEQ, "global_size": 16, "micro_size": 4, "document_mask": document_mask, "mtp": 5}
    found = np.zeros((2, 5), dtype=int)
    with Loader(sources, order, **sizes) as loader:
        for step in (next(loader) for _ in range(12)):
            found[0] += step.mtp_labels
            for each in step.microbatches:
                documents = each.documents if each.packed else None
                for depth in range(5):
                    asked = inputs_ahead(each.tokens, each.labels, documents, torch.arange(SEQ), depth + 1)[1]
                    found[1, depth] += int((asked != IGNORE).sum())
    assert found[0].tolist() == found[1].tolist()
    assert (found[0] > 0).all()
