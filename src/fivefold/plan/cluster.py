"""The machines of a run: which accelerators, how many, what joins them, what they cost.

Everything the run file leaves `auto` is the catalogue's. Domain and node are counted along the numbering of the ranks:
the first `per_node` ranks are the first node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fivefold.config.run import Run
from fivefold.errors import UserError
from fivefold.hardware.accelerator import Accelerator
from fivefold.hardware.catalogue import by_name
from fivefold.hardware.entry import QUANTITIES
from fivefold.hardware.node import filled
from fivefold.hardware.rule import which_gpu


@dataclass(frozen=True)
class Cluster:
    """So many accelerators of one kind."""

    accelerator: Accelerator
    gpus: int
    per_node: int
    link: float
    """bytes/s in one direction of an accelerator's links inside a domain; 0 if there is only PCIe."""
    domain: int
    """Accelerators that the links join: the node's, or more (72 over nodes of 4)."""
    nic: float
    """bytes/s in one direction of the network between nodes, for one accelerator; 0 if there is a single node."""
    price: float | None = None
    """Money for an accelerator and hour."""

    @property
    def nodes(self) -> int:
        """Nodes that the accelerators fill, the last one perhaps not wholly."""
        return -(-self.gpus // self.per_node)

    def json(self) -> dict[str, Any]:
        """What it is, as plain values, and how sure the catalogue is of it."""
        return {
            "accelerator": self.accelerator.name,
            "gpus": self.gpus,
            "gpus_per_node": self.per_node,
            "nodes": self.nodes,
            "confidence": dict(self.accelerator.confidence),
        }

    @property
    def nearby(self) -> int:
        """Accelerators that exchange without the network: a node's, or of links that reach over nodes a domain's."""
        return self.filled if self.domain > self.per_node else self.per_node

    @property
    def filled(self) -> int:
        """Accelerators of each domain that the run takes."""
        return filled(self.domain, self.per_node, self.gpus)


def notes_on_nodes(cluster: Cluster, tp: int, ep: int = 1) -> tuple[str, ...]:
    """What should be known of the nodes: that the accelerators do not fill them, that tp reaches beyond one, or that
    ep fills neither a whole part of one nor whole ones."""
    gpus, node, near = cluster.gpus, cluster.per_node, cluster.nearby
    nodes = f"{'nodes' if cluster.domain <= node else 'domains'} of {near:,}"
    said = []
    if gpus > node and gpus % node != 0:
        said.append(f"{gpus:,} GPUs are {gpus / node:,.1f} nodes of {node:,} (cluster.gpus_per_node)")
    if gpus > near and near % tp != 0:
        said.append(f"tp {tp} crosses {nodes}")
    if gpus > near and near % ep != 0 and ep % near != 0:
        said.append(f"ep {ep} lies across {nodes}, so that tokens for its experts cross the network once a rank")
    return (", and ".join(said),) if said else ()


def cluster_of(run: Run) -> Cluster:
    """The cluster of a run on a known number of ranks.

    Raises UserError if the run names no accelerator or an unknown one, or if a number cannot be one of its unit.
    """
    asked = run.cluster
    if asked.gpu == "auto":
        raise UserError(which_gpu())
    if asked.gpus == "auto":
        raise UserError("how many GPUs there are is not known; give --gpus N (cluster.gpus)")
    return cluster(
        by_name(asked.gpu),
        asked.gpus,
        None if asked.gpus_per_node == "auto" else asked.gpus_per_node,
        None if asked.nic_gbit_s == "auto" else asked.nic_gbit_s,
        asked.price_per_gpu_hour,
    )


def cluster(
    accelerator: Accelerator,
    gpus: int,
    per_node: int | None = None,
    nic_gbit_s: float | None = None,
    price: float | None = None,
) -> Cluster:
    """`gpus` accelerators; None is what the catalogue says. Raises UserError as `cluster_of` does."""
    node = per_node or accelerator.per_node
    domain = accelerator.domain if accelerator.spans_nodes else min(accelerator.domain, node)
    nic = accelerator.nic if nic_gbit_s is None else _nic(nic_gbit_s)
    if gpus > max(node, domain) and not nic:
        raise UserError(
            f"{gpus:,} {accelerator.name} are more than the {max(node, domain):,} that are joined directly, and "
            "nothing says how fast the network between them is; give cluster.nic_gbit_s"
        )
    return Cluster(accelerator, gpus, node, accelerator.link if domain > 1 else 0.0, domain, nic, price)


def _nic(gbit_s: float) -> float:
    """bytes/s of Gbit/s."""
    wanted = QUANTITIES["nic_gbit_s"]
    if not wanted.low <= gbit_s <= wanted.high:
        meant = next((f"{gbit_s / 10**power:g}" for power in (3, 9) if 1 <= gbit_s / 10**power <= 3200), None)
        hint = f"; do you mean {meant}?" if meant else ""
        raise UserError(
            f"cluster.nic_gbit_s = {gbit_s:g}: it is the network of one GPU in Gbit/s, between {wanted.low:g} and "
            f"{wanted.high:,.0f}, such as 400{hint}"
        )
    return gbit_s * wanted.scale
