"""What happens in a pipeline from step to step: other lengths, validation in between, any number of microbatches.

The oracle is a plain model that sees one microbatch after the other, and torch's own optimizer. Losses, norms, each
gradient of each step and each validation agree to 1e-10 in fp64.
"""

# b sequences  s tokens

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple
from zlib import crc32

import pytest
import torch

from fivefold.config.rules import check
from fivefold.config.schedules import SCHEDULES
from fivefold.data.loader import IGNORE, Microbatch, Step
from fivefold.model.family import family
from fivefold.model.part import WHOLE
from fivefold.parallel.state import TIED_COPY, local_part
from fivefold.train.evaluate import validation_loss
from tests.parity.cases import LABELS, LR, MODELS, OPTIM, SEQ_LEN, Case, edges, randomize_vectors
from tests.parity.pieces import TOLERANCE, Pieces, faults
from tests.parity.rank import Rank

MODEL = MODELS["llama-tied"]
CHUNKS = {name: demands.chunks or 2 for name, demands in SCHEDULES.items()}
SHORT, LONG = 11, 36


class Item(NamedTuple):
    """A step or a validation."""

    trains: bool
    lengths: tuple[int, ...]
    """Tokens of a sequence of each microbatch, which has two sequences."""


PROGRAM = (
    Item(False, (SHORT,)),
    Item(True, (SEQ_LEN,) * 4),
    Item(False, (SHORT,) * 3),
    Item(True, (SEQ_LEN,) * 4),
    Item(False, (LONG,) * 7),
    Item(True, (LONG,) * 4),
    Item(True, (7, LONG, SEQ_LEN, 1)),
    Item(False, (SEQ_LEN, 5)),
    Item(True, (SEQ_LEN, 7, 7, LONG)),
)


@dataclass(frozen=True)
class Found:
    """What an item gave on a rank, or in the oracle."""

    loss: float
    norm: float = 0.0
    gradients: Pieces = field(default_factory=dict)
    embeddings: tuple[int, ...] = ()
    """After the step, the checksums of the embedding and of its copy, as far as the rank has them."""


@functools.cache
def microbatches(number):
    """Those of an item: with no label at all, a few or all of them, and every other one packed."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for place, length in enumerate(PROGRAM[number].lengths):
        rows = torch.randint(0, MODEL.vocab, (2, length + 1), generator=generator)
        rows[:, ::3] = edges(MODEL.vocab)[rows[:, ::3] % len(edges(MODEL.vocab))]
        labels_bs = rows[:, 1:].clone()
        for row in range(2):
            labels_bs[row, LABELS[(number + 2 * place + row) % len(LABELS)] :] = IGNORE
        documents_bs = torch.zeros_like(labels_bs, dtype=torch.int32)
        documents_bs[:, length // 2 :] = place % 2
        found.append(Microbatch(rows[:, :-1].clone(), labels_bs, documents_bs, packed=length > 1 and place % 2 == 1))
    return found


def labels_of(batches):
    return sum(int((batch.labels >= 0).sum()) for batch in batches)


def share(batch, rank):
    """A rank's rows of a microbatch."""
    rows = slice(rank.mesh.dp_rank, None, rank.mesh.dp)
    return Microbatch(batch.tokens[rows], batch.labels[rows], batch.documents[rows], batch.packed)


def run_program(case):
    """What each item gave on this rank."""
    rank = Rank(case)
    done = []
    for number, item in enumerate(PROGRAM):
        labels = labels_of(microbatches(number))
        batches = [share(batch, rank) for batch in microbatches(number)]
        if item.trains:
            result = rank.train(Step(batches, labels, 0, 2 * len(batches)))
            done.append(Found(result.loss.item(), result.norm.item(), rank.gradients, embeddings(rank)))
        else:
            done.append(Found(validation_loss(rank.pipeline, batches, rank.mesh)))
    return done


def embeddings(rank):
    """The checksum of the embedding, of each one that this rank has."""
    found = []
    for stage in rank.pipeline.stages.values():
        found += [weight for name, weight in stage.named_parameters() if name == "embedding.weight"]
        found += [module.weight for module in stage.modules() if hasattr(module, TIED_COPY)]
    return tuple(crc32(local_part(weight).detach().numpy().tobytes()) for weight in found)


@functools.cache
def alone():
    """What each item gives in one process, without any of the pipeline."""
    chosen = family(MODEL)
    model = chosen.build(MODEL, WHOLE).double()
    parameters = dict(model.named_parameters())
    chosen.initialize(parameters, MODEL, 0)
    randomize_vectors("llama", parameters)
    groups = [
        {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=OPTIM.betas, eps=OPTIM.eps, foreach=False)
    done = []
    for number, item in enumerate(PROGRAM):
        batches = microbatches(number)
        losses = [model(batch.tokens, batch.labels, batch.documents, batch.packed) for batch in batches]
        loss = torch.stack(losses).sum() / labels_of(batches)
        if not item.trains:
            done.append(Found(loss.item()))
            continue
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in parameters.items()}
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
        for p in parameters.values():
            p.grad *= min(1.0, OPTIM.clip / norm)
        optimizer.step()
        optimizer.zero_grad()
        done.append(Found(loss.item(), norm, gradients))
    return done


def case_of(schedule, **more):
    """Two ranks, and four microbatches of two sequences over all ranks of dp."""
    micro = 2 // more.get("dp", 1)
    return Case("llama-tied", pp=2, schedule=schedule, chunks=CHUNKS[schedule], micro=micro, **more)


LAYOUTS = [*map(case_of, SCHEDULES), case_of("zb-v", tp=2), case_of("zb-h1", dp=2, zero=3)]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_other_lengths_and_validation_between_steps_change_nothing(ranks, case):
    """The fault elsewhere: stages were made anew when shapes changed, and what was accumulated was lost."""
    assert check(case.run, case.world) == []
    by_rank = ranks.run(case.world, run_program, case)
    for number, expected in enumerate(alone()):
        found = [done[number] for done in by_rank]
        for each in found:
            assert each.loss == pytest.approx(expected.loss, rel=TOLERANCE), f"loss of item {number}"
            assert each.norm == pytest.approx(expected.norm, rel=TOLERANCE), f"norm of item {number}"
        pieces = [each.gradients for each in found]
        assert list(faults(f"item {number}: gradient", expected.gradients, pieces, TOLERANCE)) == []


@pytest.mark.parametrize("case", [case_of("1f1b"), case_of("zb-v")], ids=str)
def test_the_copy_of_a_tied_embedding_is_its_owner_bit_for_bit_after_each_step(ranks, case):
    by_rank = ranks.run(case.world, run_program, case)
    for number, item in enumerate(PROGRAM):
        held = [weight for done in by_rank for weight in done[number].embeddings]
        assert len(held) == (2 if item.trains else 0)
        assert len(set(held)) == (1 if item.trains else 0)


COUNTS = [
    Case("llama", pp=2, schedule=schedule, chunks=CHUNKS[schedule], rows=count, micro=1, steps=2)
    for schedule, demands in SCHEDULES.items()
    for count in (1, 2, 3, 16)
    if count >= demands.fewest(2)
]


@pytest.mark.parametrize("case", COUNTS, ids=str)
def test_gradients_are_sums_whatever_the_number_of_microbatches(harness, case):
    """The fault elsewhere: what had been accumulated was divided by the number of microbatches again and again."""
    assert check(case.run, case.world) == []
    assert harness.difference(case) is None
