"""How long ranks take to exchange bytes: collectives over tiers of links, each a latency and a bandwidth.

The tiers of a cluster, innermost first: a domain that links join (8 accelerators of a node, or 72 of several), the node
through PCIe where a domain is smaller, and the network. A ring through several tiers runs at the slowest of them, and a
tier is faster the more members of the group share its crossing: between nodes a collective has the network of every
member that a node holds, not that of one. What is not in the catalogue stands in `NetworkConstants`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, gcd, inf, log2
from typing import Literal, NamedTuple

from fivefold.hardware.accelerator import Accelerator, Collective
from fivefold.parallel.grid import Grid
from fivefold.plan.cluster import Cluster

Kind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send"]

PAIR_OF_H200 = {"all-reduce": 291, "reduce-scatter": 232.5, "all-gather": 237, "all-to-all": 272.5, "send": 342}
"""GB/s that pass a link in one direction when two H200s exchange 512 MiB (NCCL 2.28, 450 GB/s at most)."""

MESSAGES_AT_ONCE = 4
"""Of the many small messages of an all-to-all, those whose latencies overlap."""


@dataclass(frozen=True)
class NetworkConstants:
    """What the catalogue does not say of a network, measured or assumed."""

    link_efficiency: float = PAIR_OF_H200["all-reduce"] / 450
    """Share of a link's rate that a large all-reduce reaches; measured on two H200s."""
    kinds: Mapping[str, float] = field(
        default_factory=lambda: {kind: rate / PAIR_OF_H200["all-reduce"] for kind, rate in PAIR_OF_H200.items()}
    )
    """What others reach on a link, as a multiple of that."""
    pcie_efficiency: float = 0.75
    """Share of PCIe's rate that accelerators of one node reach through it; assumed."""
    nic_efficiency: float = 0.9
    """Share of the network's rate that large messages reach, of any kind; Calculon's value for InfiniBand."""
    start: float = 36e-6
    """Seconds that a collective of no bytes takes on two ranks of a link; measured on two H200s."""
    link_hop: float = 1.5e-6
    """Seconds that each further rank of a ring adds; assumed."""
    nic_hop: float = 6e-6
    """Seconds that each crossing between nodes adds; assumed."""


STANDARD = NetworkConstants()


@dataclass(frozen=True)
class Group:
    """Ranks that exchange: `size` of them, `stride` apart in the numbering, in each such block; or these very ranks."""

    size: int
    stride: int = 1
    ranks: tuple[int, ...] | None = None

    @classmethod
    def of_ranks(cls, ranks: Sequence[int]) -> Group:
        """The group of just these ranks."""
        return cls(len(ranks), 1, tuple(sorted(ranks)))


@dataclass(frozen=True)
class Groups:
    """The groups of a layout, one for each thing that ranks exchange."""

    tp: Group
    cp: Group
    shard: Group
    """shard x cp: what ZeRO spreads dense parameters over."""
    replicate: Group
    pp: Group
    ep: Group
    expert_shard: Group
    """The replicas of an expert, which shard it."""

    @classmethod
    def of(cls, grid: Grid, ep: int = 1) -> Groups:
        """In the numbering of `fivefold.parallel.grid`: tp innermost, pp outermost, ep innermost of its own mesh."""
        stage = grid.world // grid.pp
        return cls(
            tp=Group(grid.tp),
            cp=Group(grid.cp, grid.tp),
            shard=Group(grid.shard * grid.cp, grid.tp),
            replicate=Group(grid.replicate, grid.shard * grid.cp * grid.tp),
            pp=Group(grid.pp, stage),
            ep=Group(ep),
            expert_shard=Group(stage // ep, ep),
        )


TierName = Literal["link", "pcie", "nic"]


class Tier(NamedTuple):
    """One level of links as a group uses it."""

    name: TierName
    lane: float
    """bytes/s of one accelerator's way through the tier, one direction, at most."""
    lanes: int
    """Such ways that the group has at each crossing: its members on the near side, in the part that has the fewest."""
    crossings: int
    """Of the steps of a ring, those that pass the tier."""
    peers: int
    """Other members that a rank reaches through the tier."""


class Once(NamedTuple):
    """What is left of an all-to-all whose rows go once to where several copies of them were wanted."""

    node: float
    """The share of the bytes for other nodes that crosses the network; inside a node they are spread to its members."""
    rank: float = 1.0
    """The share of the bytes for other members that passes a node's links."""
    in_turns: bool = False
    """Whether the rows of a node are spread when all have come, instead of meanwhile."""


def collective_seconds(
    kind: Kind,
    bytes: float,
    group: Group,
    cluster: Cluster,
    constants: NetworkConstants | None = None,
    once: Once | None = None,
) -> float:
    """Seconds from the last rank's arrival to the end, while the cluster's other groups of this kind do the same.

    `bytes` are those of the whole buffer: what every rank holds before an all-reduce or a reduce-scatter, or after an
    all-gather; what each rank has for all others and itself together in an all-to-all; one message of a send, which
    goes to the next rank of the group and, where some next rank is on another node, over the network. With `once` an
    all-to-all moves less than its bytes.
    """
    constants = constants or constants_of(cluster.accelerator)
    tiers = tiers_of(group, cluster)
    if not tiers or bytes <= 0:
        return 0.0
    hops = [constants.nic_hop if tier.name == "nic" else constants.link_hop for tier in tiers]
    if kind == "send":
        outer = tiers[-1]
        return constants.start + hops[-1] + bytes / (outer.lane * _share(kind, outer, constants))
    if kind == "all-to-all":
        messages = sum(hop * tier.peers for hop, tier in zip(hops, tiers, strict=True))
        crosses = tiers[-1].name == "nic"
        each = [_peers(tier, group, crosses, once) / (tier.lane * _share(kind, tier, constants)) for tier in tiers]
        in_turns = once is not None and once.in_turns
        start = constants.start * (len(tiers) if in_turns else 1)
        return start + messages / MESSAGES_AT_ONCE + bytes / group.size * (sum(each) if in_turns else max(each))
    rounds = 2 if kind == "all-reduce" else 1
    latency = rounds * sum(hop * _steps(kind, tier.crossings) for hop, tier in zip(hops, tiers, strict=True))
    moved = rounds * bytes * (group.size - 1) / group.size
    return constants.start + latency + moved / min(_bus(kind, tier, constants) for tier in tiers)


def bus_bandwidth(kind: Kind, group: Group, cluster: Cluster, constants: NetworkConstants | None = None) -> float:
    """bytes/s of a ring at each rank, on average: the slowest tier's lanes together; infinite for a single rank."""
    constants = constants or constants_of(cluster.accelerator)
    return min((_bus(kind, tier, constants) for tier in tiers_of(group, cluster)), default=inf)


def _peers(tier: Tier, group: Group, crosses: bool, once: Once | None) -> float:
    """Members of a group to whose number the bytes are in proportion that an all-to-all moves through a tier.

    What crosses the network once for several members of a node is spread among them: all that is not for a rank itself.
    """
    if once is None:
        return tier.peers
    if tier.name == "nic":
        return tier.peers * once.node
    return once.rank * (group.size * tier.peers / (tier.peers + 1) if crosses else tier.peers)


def _bus(kind: Kind, tier: Tier, constants: NetworkConstants) -> float:
    return tier.lane * tier.lanes * _share(kind, tier, constants)


def _share(kind: Kind, tier: Tier, constants: NetworkConstants) -> float:
    """The share of a lane that is reached."""
    if tier.name == "link":
        return constants.link_efficiency * constants.kinds[kind]
    return constants.pcie_efficiency if tier.name == "pcie" else constants.nic_efficiency


def _steps(kind: Kind, crossings: int) -> int:
    """Steps that follow each other: those of a ring, or of the tree that an all-reduce takes where it is shorter."""
    return min(crossings, ceil(log2(crossings + 1))) if kind == "all-reduce" else crossings


def tiers_of(group: Group, cluster: Cluster) -> tuple[Tier, ...]:
    """The tiers that a group of more than one rank crosses, innermost first; of several such groups the worst placed.

    A mesh of links, whose ranks have a link to each other rank, gives a group the links between its members alone.
    """
    reach = _Reach(cluster.gpus, cluster.filled, cluster.per_node, cluster.link, cluster.accelerator.pair)
    return _tiers(group, reach, cluster.accelerator.pcie, cluster.nic)


class _Reach(NamedTuple):
    """What of a cluster decides how a group lies in it."""

    gpus: int
    domain: int
    per_node: int
    link: float
    pair: float


@lru_cache(maxsize=65536)
def _tiers(group: Group, reach: _Reach, pcie: float, nic: float) -> tuple[Tier, ...]:
    units: list[tuple[TierName, int]] = []
    if reach.link and reach.domain > 1:
        units.append(("link", reach.domain))
    if not units or reach.per_node > reach.domain:
        units.append(("pcie", reach.per_node))
    tiers = []
    parts, lanes = group.size, 1
    for name, unit in units:
        spread = _spread(group, unit, reach.gpus)
        if spread.most > lanes:
            lane = min(reach.link, reach.pair * (spread.most - 1)) if name == "link" else pcie
            tiers.append(Tier(name, lane, lanes, parts - spread.parts, spread.most - lanes))
        parts, lanes = spread.parts, spread.fewest
    if parts > 1:
        tiers.append(Tier("nic", nic, lanes, parts - 1, group.size - lanes))
    return tuple(tiers)


class _Spread(NamedTuple):
    """How a group's members lie in units of so many ranks."""

    parts: int
    fewest: int
    most: int


def _spread(group: Group, unit: int, gpus: int) -> _Spread:
    """Units that a group touches, and its members in the unit that has the fewest and in the one that has the most."""
    if group.ranks is not None:
        return _count(group.ranks, unit)
    block = group.size * group.stride
    starts = min(unit // gcd(unit, block), max(1, gpus // block))
    found = [_count(range(start * block, (start + 1) * block, group.stride), unit) for start in range(starts)]
    return max(found, key=lambda each: (each.parts, -each.fewest))


def _count(ranks: Sequence[int], unit: int) -> _Spread:
    counts = Counter(rank // unit for rank in ranks)
    return _Spread(len(counts), min(counts.values()), max(counts.values()))


@lru_cache(maxsize=64)
def _fitted(rows: tuple[Collective, ...]) -> tuple[Mapping[str, float], float]:
    """(bytes/s on each rank's link, by kind; seconds of no bytes): a line through the smallest and largest message."""
    ranks = max(row.ranks for row in rows)
    rates: dict[str, float] = {}
    starts = []
    for kind in dict.fromkeys(row.kind for row in rows if row.ranks == ranks):
        mine = sorted((row for row in rows if row.kind == kind and row.ranks == ranks), key=lambda row: row.bytes)
        small, large = mine[0], mine[-1]
        moved = {"all-reduce": 2 * (ranks - 1) / ranks, "send": 1.0}.get(kind, (ranks - 1) / ranks)
        rates[kind] = moved * large.bytes / large.seconds
        if large.bytes > small.bytes and large.seconds > small.seconds:
            rates[kind] = moved * (large.bytes - small.bytes) / (large.seconds - small.seconds)
        starts.append(max(0.0, small.seconds - moved * small.bytes / rates[kind]))
    return rates, sum(starts) / len(starts)


def constants_of(accelerator: Accelerator, otherwise: NetworkConstants | None = None) -> NetworkConstants:
    """`otherwise` (or the standard constants), with what the accelerator's own file says was measured of its links.

    Of an accelerator without links the measured collectives went through PCIe.
    """
    constants, measured = otherwise or STANDARD, accelerator.measured
    if measured is None:
        return constants
    if measured.network and accelerator.nic:
        constants = replace(constants, nic_efficiency=measured.network / accelerator.nic)
    if not measured.collectives:
        return constants
    rates, start = _fitted(tuple(measured.collectives))
    base = rates.get("all-reduce", next(iter(rates.values())))
    if not accelerator.link:
        return replace(constants, pcie_efficiency=base / accelerator.pcie, start=start)
    kinds = dict(constants.kinds) | {kind: rate / base for kind, rate in rates.items()}
    return replace(constants, link_efficiency=base / accelerator.link, kinds=kinds, start=start)
