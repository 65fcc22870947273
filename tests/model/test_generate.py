"""Continuing a row of tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fivefold.config.run import Model
from fivefold.errors import UserError
from fivefold.model.init import initialize
from fivefold.model.transformer import Transformer
from fivefold.train.generate import choose, generate

MODEL = Model(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=50, context=32, init_std=0.3)
P = torch.tensor([0.1, 0.5, 0.15, 0.25], dtype=torch.float64)


class Counting(nn.Module):
    """The likeliest token is the one after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.scale * nn.functional.one_hot((tokens + 1) % 10, 10)


@pytest.fixture(scope="module")
def model() -> Transformer:
    transformer = Transformer(MODEL)
    initialize(dict(transformer.named_parameters()), MODEL, seed=0)
    return transformer


def drawn(seed: int = 0, **settings: float) -> set[int]:
    generator = torch.Generator().manual_seed(seed)
    options = {"temperature": 1.0, "top_k": None, "top_p": None, **settings}
    return {choose(P.log(), generator=generator, **options) for _ in range(300)}  # type: ignore[arg-type]


def test_greedy_takes_the_likeliest_and_stops_after_the_end_of_document() -> None:
    assert list(generate(Counting(), [3], 4, context=100, temperature=0)) == [4, 5, 6, 7]
    assert list(generate(Counting(), [3], 20, context=100, temperature=0, eod=6)) == [4, 5, 6]


def test_greedy_continues_as_the_logits_say(model: Transformer) -> None:
    tokens = [1, 2, 3]
    for token in generate(model, [1, 2, 3], 5, context=32, temperature=0):
        assert token == model(torch.tensor([tokens]))[0, -1].argmax()
        tokens.append(token)
    assert len(tokens) == 8


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others(model: Transformer) -> None:
    first, again, other = (
        list(generate(model, [1], 20, context=32, generator=torch.Generator().manual_seed(seed))) for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_top_k_keeps_the_likeliest_and_top_p_the_fewest_that_reach_it() -> None:
    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 3}
    assert drawn(top_k=100) == {0, 1, 2, 3}
    assert drawn(top_p=0.5) == {1}
    assert drawn(top_p=0.51) == {1, 3}
    assert drawn(top_p=0.8) == {1, 2, 3}
    assert drawn(top_p=1e-9) == {1}


def test_a_low_temperature_sharpens() -> None:
    assert drawn(temperature=0.05) == {1}
    assert drawn(temperature=0) == {1}


@pytest.mark.parametrize(
    ("prompt", "new", "settings", "message"),
    [
        ([], 1, {}, "the prompt holds no token"),
        ([1] * 30, 3, {}, "a prompt of 30 tokens and 3 new ones exceed the model's context of 32 tokens: .* at most 2"),
        ([1] * 40, 3, {}, "at most 0"),
        ([1], 1, {"temperature": -1.0}, "temperature of -1.0"),
        ([1], 1, {"temperature": float("nan")}, "temperature of nan"),
        ([1], 1, {"top_k": 0}, "top_k is 0"),
        ([1], 1, {"top_p": 0.0}, "top_p is 0.0"),
        ([1], 1, {"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(prompt: list[int], new: int, settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(Counting(), prompt, new, context=32, **settings)
