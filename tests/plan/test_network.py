"""How long ranks take to exchange bytes, against what was measured and against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fivefold.hardware.accelerator import Collective, Measured
from fivefold.hardware.catalogue import by_name
from fivefold.parallel.grid import Grid
from fivefold.plan.cluster import Cluster, cluster
from fivefold.plan.time.network import (
    Group,
    Groups,
    Kind,
    NetworkConstants,
    Once,
    bus_bandwidth,
    collective_seconds,
    constants_of,
    tiers_of,
)

MIB = 2**20
RING: tuple[Kind, ...] = ("all-reduce", "reduce-scatter", "all-gather")
PERFECT = NetworkConstants(1.0, dict.fromkeys((*RING, "all-to-all", "send"), 1.0), 1.0, 1.0, 0.0, 0.0, 0.0)


def of(name: str, gpus: int, nic_gbit_s: float | None = None, per_node: int | None = None) -> Cluster:
    return cluster(by_name(name), gpus, per_node, nic_gbit_s)


def names(group: Group, machines: Cluster) -> list[str]:
    return [tier.name for tier in tiers_of(group, machines)]


@pytest.mark.parametrize(
    ("kind", "gb_s"),
    [("all-reduce", 291), ("reduce-scatter", 465), ("all-gather", 474), ("all-to-all", 545), ("send", 342)],
)
def test_two_h200s_exchange_half_a_gibibyte_and_a_mebibyte_as_measured(kind: Kind, gb_s: float) -> None:
    pair = of("h200", 2)
    assert collective_seconds(kind, 512 * MIB, Group(2), pair) == pytest.approx(512 * MIB / (gb_s * 1e9), rel=0.1)
    assert collective_seconds(kind, MIB, Group(2), pair) == pytest.approx(40e-6, rel=0.1)


@pytest.mark.parametrize(("gpus", "gb_s"), [(2, 47.7), (8, 312.9)])
def test_a_mesh_is_slow_for_few_as_measured_on_mi300x(gpus: int, gb_s: float) -> None:
    size = 4 * 2**30
    moved = 2 * size * (gpus - 1) / gpus
    measured = moved / collective_seconds("all-reduce", size, Group(gpus), of("mi300x", 8))
    assert measured == pytest.approx(gb_s * 1e9, rel=0.15)


def test_without_latency_a_ring_moves_its_bytes_at_the_links_rate() -> None:
    node = of("h100", 8)
    for kind, rounds in zip(RING, (2, 1, 1), strict=True):
        assert collective_seconds(kind, 450e9, Group(8), node, PERFECT) == pytest.approx(rounds * 7 / 8)
    assert collective_seconds("all-to-all", 450e9, Group(8), node, PERFECT) == pytest.approx(7 / 8)
    assert collective_seconds("send", 450e9, Group(8), node, PERFECT) == pytest.approx(1.0)


def test_between_nodes_a_collective_has_the_network_of_each_member_on_a_node() -> None:
    many = of("h100", 1024)  # 50 GB/s of network an accelerator
    for members, stride in [(1, 8), (2, 4), (4, 2), (8, 1)]:
        group = Group(16 * members, stride)
        assert bus_bandwidth("all-gather", group, many, PERFECT) == pytest.approx(members * 50e9)


def test_the_links_cap_what_the_network_of_a_node_could_carry() -> None:
    fast = of("h800", 1024, nic_gbit_s=400)  # 8 x 50 GB/s of network, and links of 200
    assert bus_bandwidth("all-gather", Group(64), fast, PERFECT) == pytest.approx(200e9)
    assert bus_bandwidth("all-gather", Group(128, 8), fast, PERFECT) == pytest.approx(50e9)
    assert collective_seconds("all-gather", 64e9, Group(64), fast, PERFECT) == pytest.approx(63 / 200)
    assert collective_seconds("all-gather", 64e9, Group(128, 8), fast, PERFECT) == pytest.approx(127 / 128 * 64 / 50)


def test_h800_has_less_than_half_of_the_links_of_h100() -> None:
    slow, fast = (collective_seconds("all-reduce", 2**30, Group(8), of(name, 8)) for name in ("h800", "h100"))
    assert slow / fast == pytest.approx(450 / 200, rel=0.02)


def test_each_rank_sends_its_part_of_an_all_to_all_over_its_own_network() -> None:
    many = of("h100", 1024)
    seconds = collective_seconds("all-to-all", 64e9, Group(64), many, PERFECT)
    assert seconds == pytest.approx(56e9 / 50e9)  # 56 of 64 peers are on other nodes


def test_rows_that_cross_once_a_node_are_spread_over_its_links() -> None:
    many = of("h100", 1024)
    half = collective_seconds("all-to-all", 64e9, Group(64), many, PERFECT, once=Once(0.5))
    tenth = collective_seconds("all-to-all", 64e9, Group(64), many, PERFECT, once=Once(0.1))
    assert half == pytest.approx(28e9 / 50e9)
    assert tenth == pytest.approx(7 / 8 * 64e9 / 450e9)  # then all that is not for a rank itself passes its link


def test_links_of_72_reach_over_nodes_of_4() -> None:
    racks = of("gb200", 576)
    assert names(Group(72), racks) == ["link"]
    assert names(Group(8, 72), racks) == ["nic"]
    assert names(Group(144), racks) == ["link", "nic"]
    assert bus_bandwidth("all-gather", Group(144), racks, PERFECT) == pytest.approx(900e9)
    node_bound = of("b200", 576)
    assert names(Group(72), node_bound) == ["link", "nic"]


def test_a_run_that_fills_no_racks_takes_64_of_each_so_that_no_group_is_torn() -> None:
    assert names(Group(64), of("gb200", 256)) == ["link"]
    assert names(Group(64), of("gb200", 576)) == ["link", "nic"]  # 8 x 72: ranks 64 to 127 lie in two racks


def test_cards_without_links_exchange_through_pcie_and_the_network() -> None:
    cards = of("l40s", 64)
    assert names(Group(8), cards) == ["pcie"]
    assert names(Group(16), cards) == ["pcie", "nic"]
    assert bus_bandwidth("all-reduce", Group(8), cards, PERFECT) == pytest.approx(32e9)


def test_a_bridge_of_four_cards_gives_a_node_of_eight_three_tiers() -> None:
    cards = of("h200-nvl", 64)
    tiers = tiers_of(Group(16), cards)
    assert [(tier.name, tier.lanes, tier.crossings) for tier in tiers] == [
        ("link", 1, 12),
        ("pcie", 4, 2),
        ("nic", 8, 1),
    ]


def test_the_worst_placed_of_several_groups_counts() -> None:
    many = of("h100", 96)
    assert names(Group(4), many) == ["link"]
    assert names(Group(6), many) == ["link", "nic"]  # ranks 6 to 11
    assert names(Group(8, 3), many) == ["link", "nic"]


def test_a_group_can_be_given_by_its_ranks() -> None:
    many = of("h100", 64)
    assert names(Group.of_ranks([3, 5, 7]), many) == ["link"]
    assert [(tier.name, tier.lanes) for tier in tiers_of(Group.of_ranks([7, 8, 9, 10]), many)] == [
        ("link", 1),
        ("nic", 1),
    ]


def test_one_rank_or_no_bytes_take_no_time() -> None:
    node = of("h100", 8)
    assert collective_seconds("all-reduce", 1e9, Group(1), node) == 0
    assert collective_seconds("all-reduce", 0, Group(8), node) == 0


def test_latency_grows_with_the_ranks_of_a_ring_and_with_their_logarithm_in_an_all_reduce() -> None:
    many = of("h100", 16384)
    ring = [collective_seconds("all-gather", 1, Group(size, 8), many) for size in (128, 256)]
    tree = [collective_seconds("all-reduce", 1, Group(size, 8), many) for size in (128, 256)]
    constants = NetworkConstants()
    assert ring[1] - ring[0] == pytest.approx(128 * constants.nic_hop)
    assert tree[1] - tree[0] == pytest.approx(2 * constants.nic_hop)


def test_more_bytes_never_take_less_time() -> None:
    for machines in (of("h100", 256), of("gb200", 144), of("l40s", 64), of("mi300x", 64)):
        for kind in (*RING, "all-to-all", "send"):
            for group in (Group(2), Group(8), Group(16), Group(8, 8)):
                seconds = [collective_seconds(kind, size, group, machines) for size in (1, 1e4, 1e6, 1e9)]
                assert seconds == sorted(seconds)
                assert seconds[0] < seconds[-1]


def test_the_groups_of_a_layout_are_those_of_the_numbering() -> None:
    grid = Grid(pp=16, replicate=2, shard=8, cp=4, tp=8)
    groups = Groups.of(grid, ep=32)
    assert groups.tp == Group(8)
    assert groups.cp == Group(4, 8)
    assert groups.shard == Group(32, 8)
    assert groups.replicate == Group(2, 256)
    assert groups.pp == Group(16, 512)
    assert (groups.ep, groups.expert_shard) == (Group(32), Group(16, 32))


def test_what_a_bench_measured_stands_in_for_the_standard_constants() -> None:
    half = [
        Collective(kind, 2, size, 1e-5 + size * moved / 100e9)
        for kind, moved in [("all-reduce", 1.0), ("all-gather", 0.5)]
        for size in (MIB, 512 * MIB)
    ]
    own = replace(by_name("h200"), measured=Measured(collectives=half))
    constants = constants_of(own)
    assert constants.link_efficiency == pytest.approx(100 / 450)
    assert constants.kinds["all-gather"] == pytest.approx(1.0)
    assert constants.start == pytest.approx(1e-5)
    assert constants.nic_efficiency == NetworkConstants().nic_efficiency
    seconds = collective_seconds("all-gather", 64 * MIB, Group(2), cluster(own, 2))
    assert seconds == pytest.approx(1e-5 + 32 * MIB / 100e9 + constants.link_hop)


def test_a_measured_network_and_measured_pcie_count_too() -> None:
    card = replace(by_name("l40s"), measured=Measured(network=6.25e9, collectives=(Collective("send", 2, 16e9, 1.0),)))
    constants = constants_of(card)
    assert constants.nic_efficiency == pytest.approx(0.5)  # of 100 Gbit/s
    assert constants.pcie_efficiency == pytest.approx(0.5)  # of 32 GB/s
    assert constants.link_efficiency == NetworkConstants().link_efficiency
