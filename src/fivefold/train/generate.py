"""Continue a row of tokens, one token at a time: greedy, or sampled with temperature, top-k and top-p.

Each token runs the whole row again, so it is the very forward that trained the model, on any layout and any family;
a cache would be faster and is a serving system's business.
"""

# v vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fivefold.errors import UserError


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: Sequence[int],
    max_new_tokens: int,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eod: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """The tokens that follow `tokens`, each as soon as it is known; ends after `eod`, which is given too.

    temperature 0 takes the likeliest token. top_k keeps the k likeliest, top_p the fewest likeliest whose probability
    reaches p. The same CPU `generator` state gives the same tokens. Raises UserError, before anything is computed, if
    the prompt is empty, prompt and new tokens exceed `context`, or a setting makes no sense.
    """
    _check(len(tokens), max_new_tokens, context, temperature, top_k, top_p)
    return _continue(model, list(tokens), max_new_tokens, temperature, top_k, top_p, eod, generator)


def _continue(
    model: nn.Module,
    tokens: list[int],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eod: int | None,
    generator: torch.Generator | None,
) -> Iterator[int]:
    device = next(model.parameters()).device
    for _ in range(max_new_tokens):
        with torch.no_grad():
            logits_v = model(torch.tensor([tokens], device=device))[0, -1]
        token = choose(logits_v.to("cpu", torch.float64), temperature, top_k, top_p, generator)
        tokens.append(token)
        yield token
        if token == eod:
            return


def choose(
    logits_v: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> int:
    """One token by its logits, as `generate` says."""
    if temperature == 0:
        return int(logits_v.argmax())
    sorted_v, tokens_v = logits_v.sort(descending=True, stable=True)
    kept = sorted_v[: min(top_k or len(sorted_v), len(sorted_v))]
    p = torch.softmax(kept / temperature, dim=-1)
    if top_p is not None:
        p = torch.where(p.cumsum(-1) - p < top_p, p, 0.0)  # a token stays if those before it do not reach top_p
    return int(tokens_v[torch.multinomial(p, 1, generator=generator)])


def _check(prompt: int, new: int, context: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if prompt == 0:
        raise UserError("the prompt holds no token: give at least one, for example the end-of-document token")
    if prompt + new > context:
        raise UserError(
            f"a prompt of {prompt} tokens and {new} new ones exceed the model's context of {context} tokens: "
            f"ask for at most {max(0, context - prompt)} new ones, or raise model.context if the model can go further"
        )
    if not temperature >= 0:
        raise UserError(f"a temperature of {temperature} makes no sense: give 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k is {top_k}: it must keep at least 1 token")
    if top_p is not None and not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}: it is a probability above 0, at most 1")
