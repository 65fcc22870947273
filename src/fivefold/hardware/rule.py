"""The rules on a run's accelerator, which lie beside the catalogue because `config` knows none.

Commands ask the first together with the rules of `config/rules.py`. A run that was begun is read without it: what it
was planned for may be gone from this machine, and its weights are still good.
"""

from __future__ import annotations

from fivefold.config.rule import Rule
from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.hardware.catalogue import by_name, names
from fivefold.hardware.local import local_accelerator


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


def which_gpu() -> str:
    """What to say where nothing tells the accelerator."""
    return (
        f"which GPU the plan is for is not known; give --gpu NAME (cluster.gpu), one of {', '.join(names())}, or "
        "a YAML file of your own"
    )


ACCELERATOR_SAID = Rule(
    "the accelerator is said",
    about=("cluster.gpu",),
    broken=lambda run: run.cluster.gpu == "auto" and local_accelerator() is None,
    says=lambda run: which_gpu(),
)
"""`cluster.gpu` is not auto, or the driver of this machine tells it; only a plan asks that."""
