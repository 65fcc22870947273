"""A model family: how its modules are built, how they start, and how Hugging Face's files hold them.

`llama` and `bloom` are one implementation; a package brings another by registering a `Family` under the entry point
`fivefold.families`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from fivefold import plugins
from fivefold.config.run import Model
from fivefold.model.hf import BLOOM, LLAMA, HFAdaptor
from fivefold.model.init import initialize
from fivefold.model.transformer import Transformer


@dataclass(frozen=True)
class Family:
    """What the rest of the house must know of an architecture."""

    name: str
    build: Callable[[Model], nn.Module]
    """Makes the modules; called on the meta device. It has `layers`, and a forward as `Transformer`'s."""
    initialize: Callable[[nn.Module, Model, int], None]
    """Fills every parameter's local shard from (module, model, seed), the same on every layout."""
    huggingface: HFAdaptor | None = None
    """How to read and write Hugging Face's files; None if the family has no such format."""


BUILT_IN = {
    "llama": Family("llama", Transformer, initialize, LLAMA),
    "bloom": Family("bloom", Transformer, initialize, BLOOM),
}


def family(model: Model) -> Family:
    """The family that `model.family` names. Raises UserError with the known names if there is none."""
    return plugins.find("families", model.family, BUILT_IN)
