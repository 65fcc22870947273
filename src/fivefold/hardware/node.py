"""How many ranks a machine has. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping


def ranks_of_node(world: int, environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of each machine, as the launcher says; all of them where it says nothing, or what cannot be."""
    said = environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() and int(said) and world % int(said) == 0 else world
