"""A model family: how its modules are built, how they start, and how Hugging Face's files hold them.

`llama`, `deepseek` and `bloom` are one implementation; a package brings another by registering a `Family` under the
entry point `fivefold.families`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fivefold import plugins
from fivefold.config.run import Model
from fivefold.model.hf import HFAdaptor
from fivefold.model.hf_bloom import BLOOM
from fivefold.model.hf_deepseek import DEEPSEEK
from fivefold.model.hf_llama import LLAMA
from fivefold.model.init import initialize
from fivefold.model.part import Part
from fivefold.model.transformer import Transformer


@dataclass(frozen=True)
class Family:
    """What the rest of the house must know of an architecture."""

    name: str
    build: Callable[[Model, Part], nn.Module]
    """Makes the modules of a part; called on the meta device. It has `layers`, and a forward as `Transformer`'s: what
    travels between its stages has a row of model.hidden numbers a token."""
    initialize: Callable[[Mapping[str, Tensor], Model, int], None]
    """Fills this rank's piece of each parameter from (whole parameters by name, model, seed), on every layout alike."""
    splits: bool = False
    """Whether `build` heeds its part. If not, only data parallelism can spread the family."""
    huggingface: HFAdaptor | None = None
    """How to read and write Hugging Face's files; None if the family has no such format."""


BUILT_IN = {
    "llama": Family("llama", Transformer, initialize, splits=True, huggingface=LLAMA),
    "deepseek": Family("deepseek", Transformer, initialize, splits=True, huggingface=DEEPSEEK),
    "bloom": Family("bloom", Transformer, initialize, splits=True, huggingface=BLOOM),
}


def family(model: Model) -> Family:
    """The family that `model.family` names. Raises UserError with the known names if there is none."""
    return plugins.find("families", model.family, BUILT_IN)
