"""Collectives over links, by hand."""

from __future__ import annotations

import pytest

from trainer.errors import RecipeError
from trainer.fakegpu.gpus import gpu_named
from trainer.fakegpu.network import Cluster, RankGroup, interconnects, sent

A100 = gpu_named("a100-80gb")
(HDR,) = interconnects("ib-hdr", A100)
GB = 10**9


def test_groups_are_found_from_their_distance() -> None:
    assert [Cluster(64, 8).group(64, 1), Cluster(4, 4).group(4, 1)] == [RankGroup(64, 8), RankGroup(4, 4)]
    # The shards of a node and their replicas; two replicas of four nodes each; two shards of a node, 16 times.
    assert [Cluster(64, 8).group(8, 1), Cluster(64, 8).group(8, 8)] == [
        RankGroup(8, 1),
        RankGroup(8, 8, concurrent_groups=8),
    ]
    assert [Cluster(64, 8).group(32, 1), Cluster(64, 8).group(2, 32)] == [
        RankGroup(32, 4),
        RankGroup(2, 2, concurrent_groups=8),
    ]
    assert Cluster(64, 8).group(16, 4) == RankGroup(16, 8, concurrent_groups=4)


def milliseconds(op: str, size: int, group: RankGroup) -> float:
    return 1e3 * HDR.seconds(op, size, group)


def test_a_ring_by_hand() -> None:
    """240 GB/s in a node and 20 GB/s between nodes: of a large tensor the few microseconds of hops do not count."""
    assert milliseconds("all_gather", 8 * GB, RankGroup(8, 1)) == pytest.approx(7 / 0.240, rel=2e-3)
    assert milliseconds("reduce_scatter", 16 * GB, RankGroup(16, 2)) == pytest.approx(15 / 0.020, rel=2e-3)
    assert milliseconds("all_reduce", 16 * GB, RankGroup(16, 2)) == pytest.approx(30 / 0.020, rel=2e-3)
    assert milliseconds("all_reduce", GB, RankGroup(1, 1)) == 0


def test_hops_by_hand() -> None:
    """Of a tensor of 8 bytes nothing else counts: 14 µs at the least, and 1.9 µs in a node or 4 between nodes."""
    assert milliseconds("all_gather", 8, RankGroup(8, 1)) == pytest.approx(0.014 + 7 * 0.0019, rel=1e-3)
    assert milliseconds("reduce_scatter", 8, RankGroup(16, 2)) == pytest.approx(0.014 + 14 * 0.0019 + 0.004, rel=1e-3)


def test_replicas_share_the_network_of_their_node() -> None:
    """Eight shards of 1 GB are reduced at once: as long as the 8 GB of which they are the eighths."""
    shards = milliseconds("all_reduce", GB, RankGroup(8, 8, concurrent_groups=8))
    assert shards == pytest.approx(milliseconds("all_reduce", 8 * GB, RankGroup(8, 8)))
    assert shards == pytest.approx(8 * milliseconds("all_reduce", GB, RankGroup(8, 8)), rel=0.01)


def test_small_tensors_of_many_ranks_are_reduced_by_a_tree() -> None:
    """Up and down 7 hops in a node and 6 doublings between 64 nodes, instead of 511 hops and back."""
    tree = milliseconds("all_reduce", 8, RankGroup(512, 64))
    assert tree == pytest.approx(0.014 + 2 * (7 * 0.0019 + 6 * 0.004), rel=1e-3)
    assert tree < 0.1 * milliseconds("all_gather", 8, RankGroup(512, 64))


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_more_to_send_or_more_ranks_never_take_less(op: str) -> None:
    sizes = [milliseconds(op, 10**exponent, RankGroup(64, 8)) for exponent in range(11)]
    ranks = [milliseconds(op, GB, RankGroup(ranks, 1)) for ranks in range(1, 65)]
    nodes = [milliseconds(op, GB, RankGroup(8 * nodes, nodes)) for nodes in range(1, 65)]
    assert [sizes, ranks, nodes] == [sorted(sizes), sorted(ranks), sorted(nodes)]


def test_what_is_sent_is_what_a_ring_sends() -> None:
    groups = [("all_gather", 4), ("all_reduce", 4), ("reduce_scatter", 1)]
    assert [sent(op, 100, RankGroup(ranks, 1)) for op, ranks in groups] == [75, 150, 0]


def test_names_of_interconnects() -> None:
    hdr, gbe = interconnects("8x-ib-hdr, pcie-4+25GbE", A100)
    assert (hdr.name, gbe.name) == ("8x-ib-hdr", "pcie-4+25gbe")
    assert hdr.inter_node.bandwidth == pytest.approx(160e9)
    assert hdr.intra_node.bandwidth == A100.link
    assert gbe.intra_node.bandwidth == pytest.approx(25.2e9)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("100gb", ["--interconnect=100gb", "did you mean 100gbe?", "ib-ndr", "between nodes"]),
        ("nvlink+100gbe", ["--interconnect=nvlink+100gbe", "'nvlink'", "within a node", "nvlink-4"]),
        ("100gbe,100gbe", ["--interconnect=100gbe,100gbe", "twice"]),
        ("0x-100gbe", ["--interconnect=0x-100gbe"]),
        ("", ["--interconnect="]),
    ],
)
def test_names_that_are_not_known(text: str, parts: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        interconnects(text, A100)
    assert [part for part in parts if part not in str(error.value)] == []
