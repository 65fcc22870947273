"""A document does not know what stands before it in its row, wherever cp cuts the row: its losses keep their bits.

Positions that restart while attention still crosses into the document before are a fault that no loss curve shows.
"""

import pytest
import torch

from fivefold.data.loader import IGNORE
from tests.parity.cases import SEQ_LEN, Case
from tests.parity.rank import Rank

CHUNK = SEQ_LEN // 4
"""Ring and gather cut a row into 2 cp chunks; two of these are one of ulysses' pieces."""
STARTS = {
    "inside a chunk": (CHUNK + 2, CHUNK + 3),
    "on a chunk's edge": (CHUNK, 2 * CHUNK),
    "on the ranks' edges": (2 * CHUNK, 3 * CHUNK),
    "after a document of one token": (1, 1),
    "the last token": (SEQ_LEN - 1, 2),
}
LAYOUTS = [
    *(Case(model, cp=2, method=method) for model in ("llama", "bloom") for method in ("ring", "gather", "ulysses")),
    Case("llama", tp=2),
    Case("llama", tp=2, cp=2),
]


@torch.no_grad()
def losses(case, seed):
    """This rank's share of the loss over the second documents of two rows, by `STARTS`; `seed` makes the first ones."""
    model = Rank(case).model
    return [model(*inputs(starts, seed), True).item() for starts in STARTS.values()]


def inputs(starts, seed):
    """Tokens, labels and documents of two rows, of which only the second document of each is to be predicted."""
    row = torch.randint(0, 1003, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    other = torch.randint(0, 1003, (2, SEQ_LEN), generator=torch.Generator().manual_seed(seed))
    second = torch.arange(SEQ_LEN) >= torch.tensor(starts)[:, None]
    return torch.where(second, row[:, :-1], other), torch.where(second, row[:, 1:], IGNORE), second.int()


@pytest.fixture(scope="module")
def alone(ranks):
    """What one process finds, by model."""
    return {model: ranks.run(1, losses, Case(model), 1)[0] for model in ("llama", "bloom")}


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_the_second_documents_loss_does_not_depend_on_the_first(ranks, alone, case):
    found = ranks.run(case.world, losses, case, 1)
    assert ranks.run(case.world, losses, case, 2) == found
    for place, by_rank, expected in zip(STARTS, zip(*found, strict=True), alone[case.model], strict=True):
        assert sum(by_rank) == pytest.approx(expected, rel=1e-12), place
