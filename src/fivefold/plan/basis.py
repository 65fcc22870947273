"""Where the rates of an accelerator come from, in a word and in a sentence. Imports no torch."""

from __future__ import annotations

from fivefold.config.run import Run
from fivefold.hardware.accelerator import Accelerator
from fivefold.plan.constants import FITTED_FAMILIES
from fivefold.plan.quantities import percent
from fivefold.plan.time.formats import product_format


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


def says_peak(run: Run, accelerator: Accelerator) -> str:
    """Of which format the peak is that an MFU is a share of, and how much that is."""
    format = product_format(run)
    return f"in {format}, {accelerator.peak_of(format) / 1e12:,.4g} TFLOP/s"


def notes_above_peak(run: Run, accelerator: Accelerator, mfu: float) -> tuple[str, ...]:
    """A note if the run is faster than the accelerator can be, so that its peak is not right."""
    if mfu <= 1:
        return ()
    format = product_format(run)
    measured = accelerator.peak_of(format) == accelerator.matmul.get(format)
    return (
        f"an MFU of {percent(mfu)}: the run is faster than the {'measured ' if measured else ''}peak of "
        f"{accelerator.name} {says_peak(run, accelerator)}; "
        + ("run `fivefold bench` again on an idle machine" if measured else "correct peak_tflops in its file"),
    )
