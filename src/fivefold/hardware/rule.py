"""The rule on a run's accelerator, which lies beside the catalogue because `config` knows none.

Commands ask it together with the rules of `config/rules.py`. A run that was begun is read without it: what it was
planned for may be gone from this machine, and its weights are still good.
"""

from __future__ import annotations

from fivefold.config.rule import Rule
from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name


def _fault(run: Run) -> str | None:
    """What is wrong with `cluster.gpu`, a name or a file, if anything is."""
    if run.cluster.gpu == "auto":
        return None
    try:
        by_name(run.cluster.gpu)
    except UserError as error:
        return str(error)
    return None


ACCELERATOR = Rule("the accelerator is known", about=("cluster.gpu",), broken=_fault, says=lambda run: str(_fault(run)))
"""`cluster.gpu` is auto, a name of the catalogue, or a file that describes an accelerator."""
