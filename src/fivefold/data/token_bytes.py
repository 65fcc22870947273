"""How wide a token is on disk. Of its own, since a plan asks it too, and loads no numpy for it."""

from __future__ import annotations


def token_bytes(vocab: int) -> int:
    """Bytes of a token: 2 where the vocabulary is under 65,500, else 4 (as Megatron-LM)."""
    return 2 if vocab < 65_500 else 4
