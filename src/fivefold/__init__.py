"""Fivefold: pretraining of large language models, from a laptop CPU to tens of thousands of GPUs.

`from fivefold import Run, plan, train` is the Python entry: `Run.load("run.yaml")` reads a run file, `train(run)` runs
it, `plan(run)` says what its ranks are. Importing this package loads no torch, and what it offers only when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivefold.config.run import Run

__version__ = "0.1.0"
__all__ = ["Run", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Run":
        from fivefold.config.run import Run

        return Run
    raise AttributeError(f"module 'fivefold' has no attribute {name!r}")
