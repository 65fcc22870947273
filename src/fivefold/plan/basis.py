"""Where the rates of an accelerator come from, in a word and in a sentence. Imports no torch."""

from __future__ import annotations

from fivefold.hardware.accelerator import Accelerator
from fivefold.plan.constants import FITTED_FAMILIES


def rates_basis(accelerator: Accelerator) -> str:
    """`measured`, `calibrated` on published runs, or `assumed`."""
    if accelerator.measured is not None:
        return "measured"
    return "calibrated" if accelerator.family in FITTED_FAMILIES else "assumed"


def rates_sentence(accelerator: Accelerator) -> str:
    """The same among the assumptions of a plan."""
    return {
        "measured": "rates of products, copies and exchanges are those that were measured on this accelerator",
        "calibrated": "rates are the catalogue's, times shares fitted on published runs on "
        f"{accelerator.family} machines",
        "assumed": f"no published run on {accelerator.name} was fitted: it is taken to reach as much of its datasheet "
        "as an H100",
    }[rates_basis(accelerator)]
