"""ALiBi's slopes against transformers, also for head counts that are no power of two."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from fivefold.kernels.alibi import alibi_slopes


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    by_position = build_alibi_tensor(torch.ones(1, 3), heads, torch.float32)[:, 0]  # (heads, 3): slope x 0, 1, 2
    slopes = torch.tensor(alibi_slopes(heads))
    torch.testing.assert_close(slopes, by_position[:, 1], rtol=1e-6, atol=0)
    torch.testing.assert_close(2 * slopes, by_position[:, 2], rtol=1e-6, atol=0)


def test_eight_heads_have_the_paper_s_slopes() -> None:
    assert alibi_slopes(8) == [2**-n for n in range(1, 9)]
