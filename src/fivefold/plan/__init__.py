"""What can be said about a run before it runs. All but `dry_run.py` is arithmetic and imports no torch.

The room itself can be called: `from fivefold import plan` and then `plan(run)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`fivefold.plan.planned.plan`: the plan of a run."""
        from fivefold.plan.planned import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
