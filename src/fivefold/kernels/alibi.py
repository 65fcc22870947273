"""ALiBi: attention scores fall linearly with distance, with another slope for each head (Press et al. 2022).

The bias of a score is slope x key position. Softmax does not see a number that is added to a whole row, so it is taken
relative to the query: slope x (key - query). That is the same in every document of a packed row without positions that
restart, and it stays exact in fp32 near the query, where it matters, however long the sequence.
"""

from __future__ import annotations

import math


def alibi_slopes(heads: int) -> list[float]:
    """One slope a head, for all heads of the model: a rank that holds some of them takes its slice.

    For n = 2^k heads they are 2^(-8/n), 2^(-16/n), ... ; otherwise those of the next lower power of two, and then every
    other one of the next higher, from its first.
    """
    lower = 2 ** math.floor(math.log2(heads))
    return _geometric(lower) + _geometric(2 * lower)[0::2][: heads - lower]


def _geometric(count: int) -> list[float]:
    return [2 ** (-8 * (i + 1) / count) for i in range(count)]
