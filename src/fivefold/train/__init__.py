"""Training: the loop (`loop.py`, read it first), one step, validation, the run's folder, and using what was trained.

The room itself can be called: `from fivefold import train` and then `train(run)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`fivefold.train.start.train`: train a run from Python."""
        from fivefold.train.start import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
