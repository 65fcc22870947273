"""The learning rate as a function of the step: warm-up, then a decay by name. Pure arithmetic.

The rate is computed anew each step from the run file and is never part of a checkpoint, so a resumed run follows the
run file that it was resumed with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fivefold.config.run import Optim
from fivefold.plugins import find

Decay = Callable[[float], float]
"""From the share of the decay that has passed (0 to 1) to the share of it that is left (1 to 0)."""

DECAYS: Mapping[str, Decay] = {
    "cosine": lambda passed: 0.5 * (1.0 + math.cos(math.pi * passed)),
    "linear": lambda passed: 1.0 - passed,
    "wsd": lambda passed: 1.0 - passed,
    "constant": lambda passed: 1.0,
}


def learning_rate(optim: Optim, step: int, total: int) -> float:
    """The rate of step `step`, of 1 to `total`: lr at the warm-up's end, lr x final_lr_fraction at `total`."""
    warmup = round(optim.warmup_fraction * total)
    if step <= warmup:
        return optim.lr * step / warmup
    start = total - decay_steps(optim, total)
    passed = min(1.0, max(0.0, (step - start) / max(1, total - start)))
    left = find("decays", optim.decay, DECAYS)(passed)
    return optim.lr * (optim.final_lr_fraction + (1.0 - optim.final_lr_fraction) * left)


def decay_steps(optim: Optim, total: int) -> int:
    """Steps of the decay, which ends with the last step."""
    after_warmup = total - round(optim.warmup_fraction * total)
    if optim.decay_steps is not None:
        return min(optim.decay_steps, after_warmup)
    return min(after_warmup, max(1, total // 5)) if optim.decay == "wsd" else after_warmup
