"""Which ranks are near each other: those of a machine, or of a domain of links that reaches over machines. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping


def ranks_of_node(world: int, environ: Mapping[str, str] = os.environ) -> int:
    """Ranks of each machine, which follow each other, as the launcher says; all where it says nothing, or what cannot
    be, or does not number the ranks machine by machine."""
    said, rank, local = (environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"))
    if not said.isdigit() or not int(said) or world % int(said):
        return world
    in_order = not (rank.isdigit() and local.isdigit()) or int(rank) % int(said) == int(local)
    return int(said) if in_order else world


def filled(domain: int, per_node: int, gpus: int) -> int:
    """Accelerators of each domain that a run takes: all, unless the links reach over several nodes.

    Then a run that fills no whole domains (256 of 72 each) takes as many of each as evenly make it (64), if that is
    three quarters or more, as schedulers place it: groups of a power of two do not lie in two domains.
    """
    if domain <= per_node or gpus <= domain:
        return domain
    least = domain * 3 // 4
    even = (count for count in range(domain, least - 1, -1) if not (count % per_node or gpus % count))
    return next(even, domain)
